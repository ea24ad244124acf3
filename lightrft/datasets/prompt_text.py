"""Prompt text: how what a row holds becomes the text that the model reads."""

import reprlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lightrft.config.arguments import DataConfig
from lightrft.datasets.media_files import KINDS, Reference
from lightrft.datasets.media_messages import (
    ItemQueue,
    is_content,
    messages_with_parts,
    placeholder,
    text_with_placeholders,
)

Message: TypeAlias = Mapping[str, Any]


class RenderedPrompt(NamedTuple):
    """A prompt's text, and what the chat template made it of."""

    text: str
    messages: Sequence[Message] | None = None
    media: Mapping[str, Sequence[Reference]] = {}
    """The items that stand in it, in order, by kind."""


class Render(Protocol):
    """A function from the value of a prompt's column, and the row's media, to the prompt."""

    def __call__(self, value: Any, items: ItemQueue | None = None) -> RenderedPrompt:
        """Raises ValueError for what it cannot read."""
        ...


def prompt_renderer(
    tokenizer: PreTrainedTokenizerBase, data: DataConfig, processor: ProcessorMixin | None = None
) -> Render:
    """How the prompts of a data set become text.

    Args:
        tokenizer: Of the model.
        data: Key and template.
        processor: Of a model that takes media.

    Raises:
        ValueError: the flags ask for a chat template that the tokenizer does not have.
    """
    if data.apply_chat_template:
        return _chat_renderer(tokenizer, data, processor)
    template = "{}" if data.input_template is None else data.input_template
    placeholders = {} if processor is None else _placeholders(processor)

    def render(value: Any, items: ItemQueue | None = None) -> RenderedPrompt:
        text = template.format(_text(value, data.input_key))
        if items is None:
            return RenderedPrompt(text)
        return RenderedPrompt(text_with_placeholders(text, items, placeholders), media=items.media())

    return render


def _placeholders(processor: ProcessorMixin) -> dict[str, str]:
    """How each kind of item is written in a plain prompt."""
    tokens = {kind: vars(processor).get(f"{kind}_token") for kind in KINDS}
    return {kind: placeholder(token) for kind, token in tokens.items() if token is not None}


def _chat_renderer(tokenizer: PreTrainedTokenizerBase, data: DataConfig, processor: ProcessorMixin | None) -> Render:
    # Templates for media may be the processor's alone.
    writer = tokenizer if processor is None or processor.chat_template is None else processor
    if writer.chat_template is None:
        raise ValueError(
            f"apply_chat_template needs a tokenizer with a chat template: {tokenizer.name_or_path} has none. "
            "Drop --apply_chat_template (and set --input_template), or choose a chat model."
        )

    write = partial(writer.apply_chat_template, tokenize=False, add_generation_prompt=True)

    def render(value: Any, items: ItemQueue | None = None) -> RenderedPrompt:
        # Tables give a message the keys of all others too, with None; templates ask whether a key is there.
        messages = [
            {key: v for key, v in message.items() if v is not None}
            for message in _messages(value, data, with_parts=items is not None)
        ]
        if items is not None:
            messages = messages_with_parts(messages, items)
        try:
            text = cast(str, write(cast(Any, messages)))
        except TemplateError as error:
            raise ValueError(
                f"the chat template must take the messages of {data.input_key!r}: {error} (roles: "
                f"{', '.join(message['role'] for message in messages)}). Change them, or --system_prompt."
            ) from error
        _check_unicode(text, data.input_key)
        return RenderedPrompt(text, messages, {} if items is None else items.media())

    return render


def _text(value: Any, key: str) -> str:
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        raise ValueError(f"{key!r} is a list of messages, which needs the chat template. Add --apply_chat_template.")
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key!r} must be a text that is not empty: got {reprlib.repr(value)}.")
    _check_unicode(value, key)
    return value


def _check_unicode(text: str, key: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # A JSON escape can hold half of a surrogate pair; tokenizers raise a TypeError for it.
        raise ValueError(f"{key!r} must be Unicode text: {error}. Correct the row.") from error


def _messages(value: Any, data: DataConfig, with_parts: bool) -> list[Message]:
    """Messages for the template: a text is one of the user, and --system_prompt comes before a system message."""
    messages: Any = [{"role": "user", "content": value}] if isinstance(value, str) and value else value
    _check_messages(messages, data.input_key, with_parts)
    if data.system_prompt is None:
        return messages
    others = messages[1:] if messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": data.system_prompt}, *others]


def _check_messages(messages: Any, key: str, with_parts: bool) -> None:
    """`with_parts` admits contents of parts, as models with media take them."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{key!r} must be a text or a list of messages, and not empty: got {reprlib.repr(messages)}. "
            "Change the row."
        )
    for index, message in enumerate(messages):
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
            is_message = False
        else:
            content = message.get("content")
            is_message = is_content(content) if with_parts else isinstance(content, str)
        if not is_message:
            parts = ", or content parts of a known type" if with_parts else ""
            raise ValueError(
                f"a message must be an object with the texts role and content{parts}: message {index} of {key!r} is "
                f"{reprlib.repr(message)}. Change the row."
            )
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"the last message of {key!r} must not be the assistant's, since the model is to answer it. "
            "Drop the message."
        )
