"""YAML form of a Config: a flat mapping with the names of the flags."""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml

from lightrft.config.arguments import Config
from lightrft.config.flags import flag_types, flag_values, is_flag


def dump_yaml(config: Any) -> str:
    """YAML text that `--config` reads back as an equal configuration."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in flag_values(config).items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def yaml_tokens(path: Path, config_type: type = Config) -> dict[str, list[str]]:
    """Command-line tokens that say what the file says, for each of its keys.

    Raises:
        ValueError: the file is missing or is no flat mapping, or a key is unknown, repeated or of a wrong kind.
    """
    if not path.is_file():
        raise ValueError(f"--config must name a YAML file: {path} is no file.")
    try:
        values = _load_mapping(path.read_text(encoding="utf-8"))
        kinds = flag_types(config_type)
        return {name: _tokens(str(name), value, kinds) for name, value in values.items()}
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _load_mapping(text: str) -> dict[str, Any]:
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("a configuration must be a mapping of flags to values. Write lines such as `seed: 1`.")
    # PyYAML keeps the last of several equal keys without a word.
    repeated = [key for key, count in Counter(str(key.value) for key, _ in node.value).items() if count > 1]
    if repeated:
        raise ValueError(f"a key may be given once: {', '.join(repeated)}. Drop all but one.")
    return yaml.safe_load(text)


def _tokens(name: str, value: Any, kinds: Mapping[str, Any]) -> list[str]:
    kind = kinds.get(name)
    if kind is None:
        raise ValueError(_unknown_key(name, kinds))
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false: {value!r}.")
        return [f"--{name}" if value else f"--no_{name}"]
    if value is None and NoneType not in get_args(kind):
        raise ValueError(f"{name} cannot be null. Drop the line to leave the flag at its default.")
    if isinstance(value, dict) or (isinstance(value, list) and get_origin(kind) is not tuple):
        raise ValueError(f"{name} must be a single value: {value!r}. Sections and lists have no meaning here.")
    items = value if isinstance(value, list) else [value]
    # A bare `yes`, `1.0` or `010` is not text for YAML, and would come back as other text than was written.
    if str in (kind, *get_args(kind)) and not all(isinstance(item, str | NoneType) for item in items):
        raise ValueError(f"{name} must be text: {value!r}. Put it in quotes.")
    # They go to the command line's parser as tokens of their own.
    if any(is_flag(str(item)) for item in items[1:]):
        raise ValueError(f"{name} may hold a text like a flag only in the first place: {value!r}. Put it there.")
    return [f"--{name}={items[0]}", *map(str, items[1:])] if items else [f"--{name}"]


def _unknown_key(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.replace("-", "_"), list(known), n=3)
    remedy = f"Close to it: {', '.join(close)}." if close else "--help lists the flags."
    return f"unknown key {name!r}. {remedy}"
