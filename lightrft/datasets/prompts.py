"""Prompt data sets: rows of sources, rendered and tokenised once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, overload

from transformers import PreTrainedTokenizerBase

from lightrft.config.arguments import DataConfig
from lightrft.config.sources import source_names
from lightrft.datasets.prompt_text import Render, prompt_renderer
from lightrft.datasets.sources import Source, read_source
from lightrft.types import PromptExample
from lightrft.utils.logging import get_logger

logger = get_logger(__name__)

TOKENIZER_BATCH = 10_000
"""Texts per call of the tokenizer, whose result takes many times their memory."""


@dataclass(frozen=True)
class PromptDataset(Sequence[PromptExample]):
    """The prompts of all sources, source after source, each in its own order."""

    examples: Sequence[PromptExample]
    source_sizes: tuple[int, ...]
    """Prompts of each source."""
    num_filtered: int
    """Rows left out because their prompt is too long."""
    num_truncated: int
    """Prompts cut to `prompt_max_len`."""

    def __len__(self) -> int:
        return len(self.examples)

    @overload
    def __getitem__(self, index: int) -> PromptExample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptExample]: ...
    def __getitem__(self, index: int | slice) -> PromptExample | Sequence[PromptExample]:
        return self.examples[index]


def load_prompts(
    names: str, split: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig, max_samples: int | None
) -> PromptDataset:
    """Prompts of the first `max_samples` rows of each source.

    Args:
        names: Files, folders and hub ids, separated by commas.
        split: Which part of folders and of data sets on the hub.
        tokenizer: Its chat template is read where the flags ask for it.
        data: Keys, template and length rule.
        max_samples: None takes all rows.

    Raises:
        ValueError: a source is missing or unreadable, a row is no object, lacks a key or holds no prompt, or a source
            has no prompt left by the length rule.
    """
    return make_prompts([read_source(name, split, max_samples) for name in source_names(names)], tokenizer, data)


def make_prompts(sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> PromptDataset:
    """Prompts of rows that were read already, numbered through the sources; raises as `load_prompts` does."""
    render = prompt_renderer(tokenizer, data)
    parts: list[PromptDataset] = []
    first_row = 0
    for source in sources:
        parts.append(_source_prompts(source, first_row, render, tokenizer, data))
        first_row += source.rows[-1][0] + 1
    return PromptDataset(
        [example for part in parts for example in part],
        tuple(len(part) for part in parts),
        sum(part.num_filtered for part in parts),
        sum(part.num_truncated for part in parts),
    )


def _source_prompts(
    source: Source, first_row: int, render: Render, tokenizer: PreTrainedTokenizerBase, data: DataConfig
) -> PromptDataset:
    """Prompts of one source; its row i is row `first_row + i` of the data set."""
    if not source.rows:
        raise ValueError(f"A source of prompts must have rows: {source.name} has none. Change the source.")
    texts = [_rendered(source, row, value, render, data) for row, value in source.rows]
    examples = []
    for (row, value), text, ids in zip(source.rows, texts, _tokenize(texts, tokenizer), strict=True):
        if not ids:
            raise ValueError(f"{source.where(row)}: a prompt must have tokens: {text!r} has none. Drop the row.")
        examples.append(_example(first_row + row, value, text, ids, data))
    return _fit(source, first_row, examples, tokenizer, data)


def _rendered(source: Source, row: int, value: Any, render: Render, data: DataConfig) -> str:
    """The prompt's text; the row has what the flags ask for."""
    try:
        if not isinstance(value, Mapping):
            raise ValueError(f"a row must be an object with columns: got {type(value).__name__}.")
        for flag, key in (("input_key", data.input_key), ("label_key", data.label_key)):
            if key not in value:
                present = ", ".join(map(str, value)) or "none"
                raise ValueError(f"no key {key!r}: it has {present}. Add it or set --{flag}.")
        return render(value[data.input_key])
    except ValueError as error:
        raise ValueError(f"{source.where(row)}: {error}") from error


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Ids of each text with one BOS, if the tokenizer adds one, whether or not the text has it; no EOS is added."""
    bos: list[Any] = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    # Some tokenizers add an EOS among their special tokens, so only what stands in front is taken from them.
    probe: Any = tokenizer("a", add_special_tokens=True)["input_ids"]
    prefix = bos if probe[: len(bos)] == bos else []
    all_ids: list[list[int]] = []
    for start in range(0, len(texts), TOKENIZER_BATCH):
        batch = texts[start : start + TOKENIZER_BATCH]
        encoded: Any = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        all_ids += encoded["input_ids"]
    return [ids if ids[: len(prefix)] == prefix else prefix + ids for ids in all_ids]


def _example(row: int, value: Mapping[str, Any], text: str, ids: list[int], data: DataConfig) -> PromptExample:
    named = (data.input_key, data.label_key, data.reference_key)
    return PromptExample(
        row=row,
        prompt=text,
        prompt_ids=ids,
        engine_prompt_ids=ids,
        label=value[data.label_key],
        reference=value.get(data.reference_key),
        extra={key: column for key, column in value.items() if key not in named},
    )


def _fit(
    source: Source,
    first_row: int,
    examples: list[PromptExample],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
) -> PromptDataset:
    """The one rule for prompts over the limit, `data.overlong_prompts`."""
    limit, rule = data.prompt_max_len, data.overlong_prompts
    overlong = [example for example in examples if len(example.prompt_ids) > limit]
    counts = f"{len(overlong)} of {len(examples)} rows of {source.name}"
    if not overlong:
        return PromptDataset(examples, (len(examples),), 0, 0)
    if rule == "error":
        first = overlong[0]
        raise ValueError(
            f"Prompts must fit into prompt_max_len={limit} tokens: {counts} do not, the first of them row "
            f"{first.row - first_row} with {len(first.prompt_ids)}. Raise --prompt_max_len, or set --overlong_prompts "
            "to filter or truncate."
        )
    if rule == "truncate":
        logger.info("%s cut to their last prompt_max_len=%d tokens", counts, limit)
        fitting = [_truncated(example, limit, tokenizer) for example in examples]
        return PromptDataset(fitting, (len(fitting),), 0, len(overlong))
    fitting = [example for example in examples if len(example.prompt_ids) <= limit]
    if not fitting:
        raise ValueError(
            f"A source needs a prompt of at most prompt_max_len tokens: 0 of {len(examples)} rows of {source.name} are "
            f"left at prompt_max_len={limit}. Raise --prompt_max_len, or set --overlong_prompts truncate."
        )
    logger.info("%s left out: longer than prompt_max_len=%d tokens", counts, limit)
    return PromptDataset(fitting, (len(fitting),), len(overlong), 0)


def _truncated(example: PromptExample, limit: int, tokenizer: PreTrainedTokenizerBase) -> PromptExample:
    """The example with the last `limit` tokens of its prompt, of which a BOS at the start stays the first."""
    ids = example.prompt_ids
    if len(ids) <= limit:
        return example
    # Some chat models name the token that opens each turn their BOS: that one belongs to its turn.
    bos = ids[:1] if ids[0] == tokenizer.bos_token_id and ids.count(ids[0]) == 1 else []
    ids = bos + ids[len(ids) - limit + len(bos) :]
    # The text that rewards and samples.jsonl show is the one that the model sees.
    return replace(example, prompt=cast(str, tokenizer.decode(ids)), prompt_ids=ids, engine_prompt_ids=ids)
