"""Reward text: what a reward model reads of a prompt and a response."""

from collections.abc import Sequence
from typing import cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lightrft.datasets.prompt_text import Message


def reward_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str, messages: Sequence[Message] | None, response: str
) -> str:
    """The messages and the response, as the assistant's turn, by the tokenizer's own chat template.

    Where there are no messages, or no template, the response follows the prompt as it is.

    Raises:
        ValueError: The template does not take these messages.
    """
    if messages is None or tokenizer.chat_template is None:
        return prompt + response
    turns = [*messages, {"role": "assistant", "content": response}]
    try:
        return cast(str, tokenizer.apply_chat_template(turns, tokenize=False))
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise ValueError(
            f"the reward model's chat template must take the messages: {error} (roles: {roles}). Change the messages, "
            "or choose another reward model."
        ) from error
