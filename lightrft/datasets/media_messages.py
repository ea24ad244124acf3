"""Media messages: where a prompt's media stand among its text, as marks, content parts or columns of the row."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lightrft.datasets.media_files import KINDS, Reference, reference, references

Message: TypeAlias = Mapping[str, Any]
Part: TypeAlias = dict[str, Any]
Media: TypeAlias = dict[str, list[Reference]]

PLACEHOLDERS = {
    "<|image_pad|>": "<|vision_start|><|image_pad|><|vision_end|>",
    "<|video_pad|>": "<|vision_start|><|video_pad|><|vision_end|>",
    "<|AUDIO|>": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
"""How families write an item whose token that is; others write the token alone."""


class ItemQueue:
    """The items of a row's columns, to be taken in order, and those that its prompt has, in its own.

    Args:
        row: The row's columns.
        columns: Column of each kind that the model takes.
        folder: Where relative paths begin.

    Raises:
        ValueError: A column holds what names no media.
    """

    def __init__(self, row: Mapping[str, Any], columns: Mapping[str, str], folder: Path | None) -> None:
        self.columns = columns
        self.folder = folder
        self._waiting: Media = {}
        for kind, key in columns.items():
            try:
                self._waiting[kind] = references(row.get(key), folder)
            except ValueError as error:
                raise ValueError(f"{key!r}: {error}") from error
        self._given = {kind: len(items) for kind, items in self._waiting.items()}
        self.marked = tuple(kind for kind, count in self._given.items() if count)
        """The kinds whose marks, such as `<image>`, stand for items of this row; elsewhere they are text."""
        self.taken: Media = {kind: [] for kind in columns}

    def take(self, kind: str, inline: Any = None) -> None:
        """An item of the prompt: `inline`, or the next one of the column.

        Raises:
            ValueError: The model takes none of this kind, or the column has no more.
        """
        if kind not in self.columns:
            known = ", ".join(self.columns)
            raise ValueError(f"the prompt has media that the model does not take: {kind}, and it takes {known}.")
        if inline is None and not self._waiting[kind]:
            raise ValueError(
                f"a prompt must have an item for each place of one: more than the {self._given[kind]} of "
                f"{self.columns[kind]!r} are asked for. Change the row, or --{kind}_key."
            )
        item = self._waiting[kind].pop(0) if inline is None else reference(inline, self.folder)
        self.taken[kind].append(item)

    def rest(self) -> list[str]:
        """The kinds of the items that no mark stands for, if the prompt has marks or parts of none of their kind.

        Raises:
            ValueError: Some have one and others not.
        """
        for kind, items in self._waiting.items():
            if items and self.taken[kind]:
                raise ValueError(
                    f"a prompt must have a place for each item, or for none of a kind: {self.columns[kind]!r} has "
                    f"{self._given[kind]} items, the prompt {len(self.taken[kind])} places. Write <{kind}> where each "
                    "is to stand."
                )
        return [kind for kind, items in self._waiting.items() for _ in items]

    def media(self) -> Media:
        return {kind: items for kind, items in self.taken.items() if items}


def messages_with_parts(messages: Sequence[Message], items: ItemQueue) -> list[dict[str, Any]]:
    """The messages with a content part, without the item itself, where each item is to stand.

    Items that have no place stand in front of the first message of the user. A message without media stays as it is.
    """
    made = [{**message, "content": _content(message["content"], items)} for message in messages]
    rest = items.rest()
    if not rest:
        return made
    for kind in rest:
        items.take(kind)
    first = next((i for i, message in enumerate(made) if message["role"] == "user"), len(made) - 1)
    made[first]["content"] = [{"type": kind} for kind in rest] + _as_parts(made[first]["content"])
    return made


def text_with_placeholders(text: str, items: ItemQueue, placeholders: Mapping[str, str]) -> str:
    """A plain prompt with the model's own placeholder where each item is to stand, by its kind."""

    def placed(kind: str) -> str:
        items.take(kind)
        return placeholders[kind]

    text = "".join(placed(piece) if is_kind else piece for is_kind, piece in _pieces(text, items.marked))
    return "".join(placed(kind) for kind in items.rest()) + text


def placeholder(token: str) -> str:
    """How an item is written whose token in the prompt is `token`."""
    return PLACEHOLDERS.get(token, token)


def is_content(content: Any) -> bool:
    """Whether it is what a message with media may hold: a text, or parts that each have their type."""
    if isinstance(content, str):
        return True
    return isinstance(content, list) and bool(content) and all(map(_is_part, content))


def _is_part(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    if part.get("type") == "text":
        return isinstance(part.get("text"), str)
    return _kind_of_part(part) in KINDS


def _kind_of_part(part: Mapping[str, Any]) -> str:
    """OpenAI's parts are of types such as `image_url`."""
    return str(part.get("type")).removesuffix("_url").replace("input_audio", "audio")


def _content(content: str | list[Mapping[str, Any]], items: ItemQueue) -> str | list[Part]:
    if isinstance(content, str):
        parts = _parts_of_text(content, items)
        return content if all(part["type"] == "text" for part in parts) else parts
    parts = []
    for part in content:
        if part["type"] == "text":
            parts += _parts_of_text(part["text"], items)
            continue
        kind = _kind_of_part(part)
        given = (part.get(name) for name in (kind, f"{kind}_url", part["type"], "url", "path"))
        items.take(kind, next((value for value in given if value is not None), None))
        parts.append({"type": kind})
    return parts


def _parts_of_text(text: str, items: ItemQueue) -> list[Part]:
    parts: list[Part] = []
    for is_kind, piece in _pieces(text, items.marked):
        if is_kind:
            items.take(piece)
        parts.append({"type": piece} if is_kind else {"type": "text", "text": piece})
    return parts


def _pieces(text: str, kinds: Sequence[str]) -> list[tuple[bool, str]]:
    """The text between the marks of these kinds, and the kinds of the marks themselves (True)."""
    if not kinds:
        return [(False, text)]
    pieces = re.split(f"<({'|'.join(kinds)})>", text)
    return [(i % 2 == 1, piece) for i, piece in enumerate(pieces) if piece]


def _as_parts(content: str | list[Part]) -> list[Part]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
