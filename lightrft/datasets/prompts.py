"""Prompt data sets: JSONL rows, tokenised once."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

from transformers import PreTrainedTokenizerBase

from lightrft.config.arguments import DataConfig
from lightrft.types import PromptExample
from lightrft.utils.logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class PromptDataset(Sequence[PromptExample]):
    """The prompts that fit, in the file's order."""

    examples: Sequence[PromptExample]
    num_filtered: int
    """Rows left out because their prompt is too long."""

    def __len__(self) -> int:
        return len(self.examples)

    @overload
    def __getitem__(self, index: int) -> PromptExample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptExample]: ...
    def __getitem__(self, index: int | slice) -> PromptExample | Sequence[PromptExample]:
        return self.examples[index]


def load_prompts(
    path: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig, max_samples: int | None
) -> PromptDataset:
    """Prompts of the first `max_samples` rows of a JSONL file, without those over `data.prompt_max_len` tokens.

    Raises:
        ValueError: the file is missing, a row is no object or lacks a key, or no prompt is left.
    """
    if not Path(path).is_file():
        raise ValueError(f"Prompts must be a JSONL file: {path} is no file.")
    rows = [(row, _check_row(value, data, path, row)) for row, value in islice(_read_rows(path), max_samples)]
    prompts = [value[data.input_key] for _, value in rows]
    ids = _tokenize(prompts, tokenizer) if prompts else []
    fitting = [
        _example(row, value, prompt_ids, data)
        for (row, value), prompt_ids in zip(rows, ids, strict=True)
        if len(prompt_ids) <= data.prompt_max_len
    ]
    num_filtered = len(rows) - len(fitting)
    if not fitting:
        raise ValueError(
            f"A data set needs a prompt of at most prompt_max_len tokens: 0 of {len(rows)} rows of {path} are left at "
            f"prompt_max_len={data.prompt_max_len}. Raise --prompt_max_len or change the file."
        )
    if num_filtered:
        logger.info(
            "%d of %d prompts left out: longer than prompt_max_len=%d tokens",
            num_filtered,
            len(rows),
            data.prompt_max_len,
        )
    return PromptDataset(fitting, num_filtered)


def _read_rows(path: str) -> Iterator[tuple[int, Any]]:
    """Line index and value of each line that is not blank."""
    # Bytes: lines end at \n alone, and the JSON decoder copes with a byte order mark.
    with open(path, "rb") as file:
        for row, line in enumerate(file):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} must hold one JSON object a line: line {row + 1}: {error}.") from error
            yield row, value


def _check_row(value: Any, data: DataConfig, path: str, row: int) -> dict[str, Any]:
    where = f"{path}, row {row} (line {row + 1})"
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a row must be a JSON object: got {type(value).__name__}.")
    for flag, key in (("input_key", data.input_key), ("label_key", data.label_key)):
        if key not in value:
            raise ValueError(f"{where}: no key {key!r}: it has {', '.join(value) or 'none'}. Add it or set --{flag}.")
    prompt = value[data.input_key]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{where}: {data.input_key!r} must be a text that is not empty: got {prompt!r}.")
    return value


def _tokenize(prompts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Ids of each prompt with one BOS, if the tokenizer adds one, whether or not the text has it; no EOS is added."""
    all_ids: Any = tokenizer(prompts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    bos: list[Any] = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    # Some tokenizers add an EOS among their special tokens, so only what stands in front is taken from them.
    probe: Any = tokenizer("a", add_special_tokens=True)["input_ids"]
    prefix = bos if probe[: len(bos)] == bos else []
    return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in all_ids]


def _example(row: int, value: dict[str, Any], prompt_ids: list[int], data: DataConfig) -> PromptExample:
    if not prompt_ids:
        raise ValueError(f"A prompt must have tokens: row {row}, {value[data.input_key]!r} has none. Drop the row.")
    named = (data.input_key, data.label_key, data.reference_key)
    return PromptExample(
        row=row,
        prompt=value[data.input_key],
        prompt_ids=prompt_ids,
        engine_prompt_ids=prompt_ids,
        label=value[data.label_key],
        reference=value.get(data.reference_key),
        extra={key: column for key, column in value.items() if key not in named},
    )
