"""Prompt text: how what a row holds becomes the text that the model reads."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightrft.config.arguments import DataConfig

Render: TypeAlias = Callable[[Any], str]
Message: TypeAlias = Mapping[str, Any]


def prompt_renderer(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Render:
    """A function from the value of `data.input_key` to the prompt's text; it raises ValueError for what it cannot read.

    Raises:
        ValueError: the flags ask for a chat template that the tokenizer does not have.
    """
    if data.apply_chat_template:
        return _chat_renderer(tokenizer, data)
    template = "{}" if data.input_template is None else data.input_template
    return lambda value: template.format(_text(value, data.input_key))


def _chat_renderer(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Render:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"apply_chat_template needs a tokenizer with a chat template: {tokenizer.name_or_path} has none. "
            "Drop --apply_chat_template (and set --input_template), or choose a chat model."
        )

    def render(value: Any) -> str:
        # Tables give a message the keys of all others too, with None; templates ask whether a key is there.
        messages = [{key: v for key, v in message.items() if v is not None} for message in _messages(value, data)]
        try:
            text = cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise ValueError(
                f"the chat template must take the messages of {data.input_key!r}: {error} (roles: "
                f"{', '.join(message['role'] for message in messages)}). Change them, or --system_prompt."
            ) from error
        _check_unicode(text, data.input_key)
        return text

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


def _messages(value: Any, data: DataConfig) -> list[Message]:
    """Messages for the template: a text is one of the user, and --system_prompt comes before a system message."""
    messages: Any = [{"role": "user", "content": value}] if isinstance(value, str) and value else value
    _check_messages(messages, data.input_key)
    if data.system_prompt is None:
        return messages
    others = messages[1:] if messages[0]["role"] == "system" else messages
    return [{"role": "system", "content": data.system_prompt}, *others]


def _check_messages(messages: Any, key: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{key!r} must be a text or a list of messages, and not empty: got {reprlib.repr(messages)}. "
            "Change the row."
        )
    for index, message in enumerate(messages):
        if not (isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in ("role", "content"))):
            raise ValueError(
                f"a message must be an object with the texts role and content: message {index} of {key!r} is "
                f"{reprlib.repr(message)}. Change the row."
            )
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"the last message of {key!r} must not be the assistant's, since the model is to answer it. "
            "Drop the message."
        )
