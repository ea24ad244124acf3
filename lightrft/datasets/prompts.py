"""Prompt data sets: rows of sources, rendered and tokenised once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, overload

from transformers import PreTrainedTokenizerBase

from lightrft.config.arguments import DataConfig
from lightrft.config.sources import source_names
from lightrft.datasets.media import MediaLoader, media_columns
from lightrft.datasets.media_files import MediaError
from lightrft.datasets.media_messages import ItemQueue
from lightrft.datasets.prompt_ids import tokenize
from lightrft.datasets.prompt_text import Render, RenderedPrompt, prompt_renderer
from lightrft.datasets.sources import Source, read_source
from lightrft.types import PromptExample
from lightrft.utils.logging import get_logger

logger = get_logger(__name__)

SHOWN_ROWS = 5
"""Of those with broken media, in a warning."""


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
    num_unreadable: int = 0
    """Rows left out because of their media."""

    def __len__(self) -> int:
        return len(self.examples)

    @overload
    def __getitem__(self, index: int) -> PromptExample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PromptExample]: ...
    def __getitem__(self, index: int | slice) -> PromptExample | Sequence[PromptExample]:
        return self.examples[index]


def load_prompts(
    names: str,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    max_samples: int | None,
    media: MediaLoader | None = None,
) -> PromptDataset:
    """Prompts of the first `max_samples` rows of each source.

    Args:
        names: Files, folders and hub ids, separated by commas.
        split: Which part of folders and of data sets on the hub.
        tokenizer: Its chat template is read where the flags ask for it.
        data: Keys, template and length rule.
        max_samples: None takes all rows.
        media: Of a model that takes media; None for text.

    Raises:
        ValueError: a source is missing or unreadable, a row is no object, lacks a key or holds no prompt, or a source
            has no prompt left by the rules of length and media.
    """
    sources = [read_source(name, split, max_samples) for name in source_names(names)]
    return make_prompts(sources, tokenizer, data, media)


def make_prompts(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    media: MediaLoader | None = None,
) -> PromptDataset:
    """Prompts of rows that were read already, numbered through the sources; raises as `load_prompts` does."""
    render = prompt_renderer(tokenizer, data, None if media is None else media.processor)
    parts: list[PromptDataset] = []
    first_row = 0
    for source in sources:
        parts.append(_source_prompts(source, first_row, render, tokenizer, data, media))
        first_row += source.rows[-1][0] + 1
    return PromptDataset(
        [example for part in parts for example in part],
        tuple(len(part) for part in parts),
        sum(part.num_filtered for part in parts),
        sum(part.num_truncated for part in parts),
        sum(part.num_unreadable for part in parts),
    )


def _source_prompts(
    source: Source,
    first_row: int,
    render: Render,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    media: MediaLoader | None,
) -> PromptDataset:
    """Prompts of one source; its row i is row `first_row + i` of the data set."""
    if not source.rows:
        raise ValueError(f"A source of prompts must have rows: {source.name} has none. Change the source.")
    columns = {} if media is None else media.columns
    prompts = [_rendered(source, row, value, render, data, columns) for row, value in source.rows]
    all_ids = tokenize([prompt.text for prompt in prompts], tokenizer)
    expanded = all_ids if media is None else _expanded(source, prompts, all_ids, media, data)
    examples = []
    for (row, value), prompt, text_ids, ids in zip(source.rows, prompts, all_ids, expanded, strict=True):
        if not text_ids:
            raise ValueError(f"{source.where(row)}: a prompt must have tokens: {prompt.text!r} has none. Drop the row.")
        if ids is not None:
            examples.append(_example(first_row + row, value, prompt, ids, data, columns))
    dataset = _fit(source, first_row, examples, tokenizer, data)
    return replace(dataset, num_unreadable=len(source.rows) - len(examples))


def _expanded(
    source: Source, prompts: Sequence[RenderedPrompt], all_ids: list[list[int]], media: MediaLoader, data: DataConfig
) -> list[list[int] | None]:
    """Ids of each prompt with all that stands for its media; None for those to be left out, by `data.media_errors`."""
    with_media = [i for i, prompt in enumerate(prompts) if prompt.media]
    results = media.expanded_ids([(prompts[i].text, prompts[i].media) for i in with_media])
    expanded: list[list[int] | None] = [*all_ids]
    faults = []
    for i, result in zip(with_media, results, strict=True):
        expanded[i] = None if isinstance(result, MediaError) else result
        if isinstance(result, MediaError):
            faults.append(f"{source.where(source.rows[i][0])}: {result}")
    counts = f"{len(faults)} of {len(prompts)} rows of {source.name}"
    if faults and (data.media_errors == "stop" or len(faults) == len(prompts)):
        raise ValueError(
            f"Media must be there and readable: {counts} have others, the first of them {faults[0]}. "
            "Correct the row, or set --media_errors skip to leave such rows out."
        )
    if faults:
        more = f"\nand {len(faults) - SHOWN_ROWS} more" if len(faults) > SHOWN_ROWS else ""
        logger.warning("%s left out for their media:\n%s%s", counts, "\n".join(faults[:SHOWN_ROWS]), more)
    return expanded


def _rendered(
    source: Source, row: int, value: Any, render: Render, data: DataConfig, columns: Mapping[str, str]
) -> RenderedPrompt:
    """The row's prompt; the row has what the flags ask for."""
    try:
        if not isinstance(value, Mapping):
            raise ValueError(f"a row must be an object with columns: got {type(value).__name__}.")
        for flag, key in (("input_key", data.input_key), ("label_key", data.label_key)):
            if key not in value:
                present = ", ".join(map(str, value)) or "none"
                raise ValueError(f"no key {key!r}: it has {present}. Add it or set --{flag}.")
        for kind, key in media_columns(data).items():
            if kind not in columns and value.get(key):
                raise ValueError(
                    f"the row has media that the model does not take: {kind}, in {key!r}. Choose another model, drop "
                    f"the column, or set --{kind}_key if it is something else."
                )
        return render(value[data.input_key], ItemQueue(value, columns, source.folder) if columns else None)
    except ValueError as error:
        raise ValueError(f"{source.where(row)}: {error}") from error


def _example(
    row: int,
    value: Mapping[str, Any],
    prompt: RenderedPrompt,
    ids: list[int],
    data: DataConfig,
    columns: Mapping[str, str],
) -> PromptExample:
    named = (data.input_key, data.label_key, data.reference_key, *columns.values())
    return PromptExample(
        row=row,
        prompt=prompt.text,
        prompt_ids=ids,
        media=prompt.media,
        messages=prompt.messages,
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
    if rule == "truncate" and (whole := [example for example in overlong if example.media]):
        raise ValueError(
            f"A prompt with media cannot be cut to prompt_max_len={limit} tokens: row {whole[0].row - first_row} of "
            f"{source.name} has {len(whole[0].prompt_ids)}. Raise --prompt_max_len, lower --image_max_pixels, or set "
            "--overlong_prompts filter."
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
    return replace(example, prompt=cast(str, tokenizer.decode(ids)), prompt_ids=ids)
