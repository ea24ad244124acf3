"""Prompt ids: a tokenizer's ids of whole prompts."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

TOKENIZER_BATCH = 10_000
"""Texts per call of the tokenizer, whose result takes many times their memory."""


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Ids of each text with one BOS, if the tokenizer adds one, whether or not the text has it; no EOS is added."""
    prefix = bos_prefix(tokenizer)
    all_ids: list[list[int]] = []
    for start in range(0, len(texts), TOKENIZER_BATCH):
        batch = list(texts[start : start + TOKENIZER_BATCH])
        encoded: Any = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        all_ids += encoded["input_ids"]
    return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in all_ids]


def bos_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What must stand in front of a prompt: a BOS, if the tokenizer adds one."""
    bos: list[Any] = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    # Some tokenizers add an EOS among their special tokens, so only what stands in front is taken from them.
    probe: Any = tokenizer("a", add_special_tokens=True)["input_ids"]
    return bos if probe[: len(bos)] == bos else []
