"""Data setup: the prompts and texts of a run, and the order that they come in."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from lightrft.config import Config, DataConfig
from lightrft.config.sources import source_shares
from lightrft.datasets.media import MediaLoader
from lightrft.datasets.prompts import PromptDataset, load_prompts, make_prompts
from lightrft.datasets.sources import Source
from lightrft.datasets.texts import load_texts
from lightrft.models.loading import LoadedConfig
from lightrft.trainer.pretraining import PretrainingTexts
from lightrft.utils.sampler import MixedSampler, PromptSampler

Rows: TypeAlias = Iterable[Mapping[str, Any]]
"""Rows of data that a caller has itself, by column: a list, a `datasets.Dataset`. The same on every rank."""
FILES_OF_ROWS = {"train_data": "prompt_data", "eval_data": "eval_data"}
"""The flag that names files in the place of rows."""


def pretraining_texts(
    config: Config, tokenizer: PreTrainedTokenizerBase, actor: LoadedConfig
) -> PretrainingTexts | None:
    """Those of --pretrain_data, no longer than a sample may be."""
    data = config.data
    if data.pretrain_data is None:
        return None
    longest = data.prompt_max_len + config.rollout.generate_max_len
    texts = load_texts(data.pretrain_data, data.pretrain_split, tokenizer, data.input_key, longest)
    return PretrainingTexts(texts, actor.hf_config)


def make_sampler(prompts: PromptDataset, config: Config) -> PromptSampler:
    """The order of the prompts; sources with shares are mixed."""
    data, train = config.data, config.train
    settings = (config.rollout.rollout_batch_size, train.num_episodes, train.seed, data.tail_batch)
    if data.prompt_data_probs is None:
        return PromptSampler(len(prompts), *settings)
    shares = source_shares(data.prompt_data_probs, len(prompts.source_sizes))
    return MixedSampler(prompts.source_sizes, shares, *settings)


def training_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, rows: Rows | None = None, media: MediaLoader | None = None
) -> PromptDataset:
    """Prompts of the caller's rows, or of those that `--prompt_data` names where there are none."""
    data = config.data
    if rows is not None:
        return _prompts_of_rows("train_data", rows, tokenizer, data, data.max_samples, media)
    assert data.prompt_data is not None, "check_config asks for it"
    return load_prompts(data.prompt_data, data.prompt_split, tokenizer, data, data.max_samples, media)


def evaluation_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, rows: Rows | None = None, media: MediaLoader | None = None
) -> PromptDataset | None:
    data = config.data
    if rows is not None:
        return _prompts_of_rows("eval_data", rows, tokenizer, data, data.max_eval_samples, media)
    if data.eval_data is None:
        return None
    return load_prompts(data.eval_data, data.eval_split, tokenizer, data, data.max_eval_samples, media)


def _prompts_of_rows(
    name: str,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    max_samples: int | None,
    media: MediaLoader | None,
) -> PromptDataset:
    # A text or a mapping is iterated over its characters or keys.
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise ValueError(
            f"{name} must be rows, such as a list of dicts: got {type(rows).__name__}. "
            f"Files are for --{FILES_OF_ROWS[name]}."
        )
    return make_prompts([Source(name, list(enumerate(islice(rows, max_samples))))], tokenizer, data, media)
