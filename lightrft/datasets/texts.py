"""Texts: rows of sources, tokenised whole, for a loss on every token."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.sources import source_names
from lightrft.datasets.sources import Source, read_source


def load_texts(
    names: str, split: str, tokenizer: PreTrainedTokenizerBase, input_key: str, max_len: int
) -> list[list[int]]:
    """Ids of each text, with the tokenizer's special tokens and an end token, at most `max_len` of them.

    Args:
        names: Files, folders and hub ids, separated by commas.
        split: Which part of folders and of data sets on the hub.
        tokenizer: That of the model that learns from them.
        input_key: Column of the text.
        max_len: What is longer is cut off.

    Raises:
        ValueError: a source is missing or unreadable, a row has no text, or no text has two tokens.
    """
    texts = []
    for name in source_names(names):
        source = read_source(name, split)
        texts += [_ids(_text(source, row, value, input_key), tokenizer)[:max_len] for row, value in source.rows]
    # The first token is predicted by none.
    usable = [ids for ids in texts if len(ids) > 1]
    if not usable:
        raise ValueError(
            f"Texts must have tokens to predict: {names} has none in {len(texts)} rows. Change the source."
        )
    return usable


def _text(source: Source, row: int, value: Any, input_key: str) -> str:
    text = value.get(input_key) if isinstance(value, Mapping) else None
    if not isinstance(text, str):
        raise ValueError(
            f"{source.where(row)}: a text must stand under {input_key!r}: got {type(text).__name__}. "
            "Add it or set --input_key."
        )
    return text


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    encoded: Any = tokenizer(text, add_special_tokens=True, verbose=False)
    ids: list[int] = encoded["input_ids"]
    end: Any = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]
