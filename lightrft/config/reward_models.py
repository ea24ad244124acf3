"""Reward models as --reward_pretrain names them: one folder, or several by name."""

import json
import re
from collections.abc import Iterable
from typing import Any

ONLY_REWARD_MODEL = "reward_model"
"""Name of the one that is given without a name."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_FORM = 'Write a folder, or {"helpful": "folder", "safe": "other folder"}.'


def reward_folders(text: str | None) -> dict[str, str]:
    """Folder or hub id of each reward model, by its name.

    Raises:
        ValueError: It is no JSON object of names and folders, or a name cannot be a metric's.
    """
    if not text or not text.strip().startswith("{"):
        return {ONLY_REWARD_MODEL: text} if text else {}
    try:
        folders = json.loads(text, object_pairs_hook=_once)
    except ValueError as error:
        raise ValueError(f"reward_pretrain must be a folder or a JSON object: {text!r} ({error}). {_FORM}") from error
    for name, folder in folders.items():
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"reward_pretrain must name models by letters, digits, _ and -: {name!r} is no such name. Change it."
            )
        if not isinstance(folder, str) or not folder:
            raise ValueError(f"reward_pretrain must map names to folders: {name!r} has {folder!r}. {_FORM}")
    return folders


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of which Python keeps the last of several equal names without a word."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} is given twice")
        found[name] = value
    return found
