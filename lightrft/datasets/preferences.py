"""Preference data sets: pairs of a better and a worse answer to a prompt, rendered and tokenised once."""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from transformers import PreTrainedTokenizerBase

from lightrft.config import DataConfig
from lightrft.config.preference import DEFAULT_MARGIN_KEY, PairDataConfig
from lightrft.config.sources import source_names
from lightrft.datasets.prompt_ids import tokenize
from lightrft.datasets.prompt_text import Render, prompt_renderer
from lightrft.datasets.reward_text import reward_text
from lightrft.datasets.sources import Source, read_source
from lightrft.utils.logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class PreferencePair:
    """One row: a prompt with each of two answers, as the reward model reads them."""

    row: int
    """Index of the row in its data set: errors name it."""
    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float
    """What the difference of the scores is to exceed."""


@dataclass(frozen=True)
class PreferenceDataset(Sequence[PreferencePair]):
    """The pairs of all sources, source after source."""

    pairs: Sequence[PreferencePair]
    num_equal: int
    """Rows left out because both answers are the same."""
    num_filtered: int
    """Rows left out because an answer is too long."""

    def __len__(self) -> int:
        return len(self.pairs)

    @overload
    def __getitem__(self, index: int) -> PreferencePair: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PreferencePair]: ...
    def __getitem__(self, index: int | slice) -> PreferencePair | Sequence[PreferencePair]:
        return self.pairs[index]


@dataclass(frozen=True)
class _Texts:
    """A row before it is tokenised."""

    row: int
    chosen: str
    rejected: str
    margin: float


def load_pairs(
    names: str, split: str, tokenizer: PreTrainedTokenizerBase, data: PairDataConfig, max_samples: int | None
) -> PreferenceDataset:
    """Pairs of the first `max_samples` rows of each source.

    A pair of equal answers teaches nothing, and one that is too long would be judged without its end: both are left
    out, and counted.

    Args:
        names: Files, folders and hub ids, separated by commas.
        split: Which part of folders and of data sets on the hub.
        tokenizer: The reward model's; its chat template is read where the flags ask for it.
        data: Keys, template and limit.
        max_samples: None takes all rows.

    Raises:
        ValueError: a source is missing or unreadable, has no row or no pair that is left, or a row is no pair.
    """
    sources = [read_source(name, split, max_samples) for name in source_names(names)]
    render = prompt_renderer(tokenizer, _prompt_flags(data))
    parts: list[PreferenceDataset] = []
    first_row = 0
    for source in sources:
        parts.append(_source_pairs(source, first_row, render, tokenizer, data))
        first_row += source.rows[-1][0] + 1
    return PreferenceDataset(
        [pair for part in parts for pair in part],
        sum(part.num_equal for part in parts),
        sum(part.num_filtered for part in parts),
    )


def _prompt_flags(data: PairDataConfig) -> DataConfig:
    """So that prompts are rendered as reinforcement learning renders them, whose reward model this is to be."""
    return DataConfig(
        input_key=data.prompt_key, apply_chat_template=data.apply_chat_template, system_prompt=data.system_prompt
    )


def _source_pairs(
    source: Source, first_row: int, render: Render, tokenizer: PreTrainedTokenizerBase, data: PairDataConfig
) -> PreferenceDataset:
    if not source.rows:
        raise ValueError(f"A source of pairs must have rows: {source.name} has none. Change the source.")
    texts = [_read(source, row, value, render, tokenizer, data) for row, value in source.rows]
    if data.margin_key != DEFAULT_MARGIN_KEY and not any(data.margin_key in value for _, value in source.rows):
        raise ValueError(
            f"margin_key must be a column: no row of {source.name} has {data.margin_key!r}. Correct --margin_key."
        )
    differing = [text for text in texts if text.chosen != text.rejected]
    chosen = tokenize([text.chosen for text in differing], tokenizer)
    rejected = tokenize([text.rejected for text in differing], tokenizer)
    pairs = [
        PreferencePair(first_row + text.row, ids, other, text.margin)
        for text, ids, other in zip(differing, chosen, rejected, strict=True)
    ]
    fitting = [pair for pair in pairs if max(len(pair.chosen_ids), len(pair.rejected_ids)) <= data.max_len]
    num_equal, num_filtered = len(texts) - len(pairs), len(pairs) - len(fitting)
    if num_equal:
        logger.warning("%d of %d rows of %s left out: both answers are the same", num_equal, len(texts), source.name)
    if num_filtered:
        counts = (num_filtered, len(texts), source.name, data.max_len)
        logger.info("%d of %d rows of %s left out: longer than max_len=%d tokens", *counts)
    if not fitting:
        raise ValueError(
            f"A source must have a pair to learn from: of the {len(texts)} rows of {source.name}, {num_equal} have "
            f"equal answers and {num_filtered} are longer than max_len={data.max_len} tokens. Change the source, or "
            "raise --max_len."
        )
    return PreferenceDataset(fitting, num_equal, num_filtered)


def _read(
    source: Source, row: int, value: Any, render: Render, tokenizer: PreTrainedTokenizerBase, data: PairDataConfig
) -> _Texts:
    try:
        if not isinstance(value, Mapping):
            raise ValueError(f"a row must be an object with columns: got {type(value).__name__}.")
        keys = {"prompt_key": data.prompt_key, "chosen_key": data.chosen_key, "rejected_key": data.rejected_key}
        for flag, key in keys.items():
            if key not in value:
                present = ", ".join(map(str, value)) or "none"
                raise ValueError(f"no key {key!r}: it has {present}. Add it or set --{flag}.")
        prompt = render(value[data.prompt_key])
        answers = [_answer(value[key], key) for key in (data.chosen_key, data.rejected_key)]
        chosen, rejected = (reward_text(tokenizer, prompt.text, prompt.messages, answer) for answer in answers)
        return _Texts(row, chosen, rejected, _margin(value.get(data.margin_key), data.margin_key))
    except ValueError as error:
        raise ValueError(f"{source.where(row)}: {error}") from error


def _answer(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be a text: got {reprlib.repr(value)}. Change the row.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{key!r} must be Unicode text: {error}. Correct the row.") from error
    return value


def _margin(value: Any, key: str) -> float:
    """0 for a row without one. Tables of text, CSV, have it as text."""
    if value is None or value == "":
        return 0.0
    try:
        margin = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(f"{key!r} must be a finite number: got {reprlib.repr(value)}. Change the row.")
    return margin
