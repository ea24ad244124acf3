"""Setup of a reward model's training: what its configuration asks for, checked, and the parts that are made of it."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config import Config, dump_yaml
from lightrft.config.preference import RewardModelConfig, check_reward_model_config, run_config
from lightrft.datasets.preferences import PreferenceDataset, PreferencePair, load_pairs
from lightrft.models.loading import LoadedConfig, context_length, empty_model, load_tokenizer
from lightrft.models.reward_model import RewardModel, load_classifier
from lightrft.strategy.roles import TrainedRole
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.checkpoint import HFFiles
from lightrft.strategy.utils.devices import check_devices
from lightrft.strategy.utils.sharded_state import role_weights
from lightrft.trainer.agreement import check_same_contents, check_same_flags, model_identity
from lightrft.trainer.checkpointing import (
    Checkpointer,
    ResumePoint,
    check_same_models,
    find_resume_point,
    flags_of,
    take_up_data,
)
from lightrft.trainer.phases import PhaseClock
from lightrft.trainer.setup import is_rank_0, make_profiler, open_writer, steps_of_run
from lightrft.utils.logging import get_logger
from lightrft.utils.memory_ledger import MemoryLedger
from lightrft.utils.metrics import MetricsWriter
from lightrft.utils.profiling import StepProfiler, check_memory_snapshots
from lightrft.utils.progress import ProgressDisplay
from lightrft.utils.sampler import PairSampler

logger = get_logger(__name__)

ROLE = "reward_model"
COURSE = ("train/accuracy", "pairs right")


@dataclass(frozen=True)
class PairInputs:
    """What a reward model's training needs, checked; no model is loaded yet."""

    run: Config
    """What strategies and checkpoints read."""
    strategy: StrategyBase
    model: LoadedConfig
    tokenizer: PreTrainedTokenizerBase
    pairs: PreferenceDataset
    eval_pairs: PreferenceDataset | None
    sampler: PairSampler
    data: str
    """Identity of the pairs and their order."""
    resume_point: ResumePoint | None
    writer: MetricsWriter


@dataclass(frozen=True)
class PairParts:
    """What the trainer drives: the model loaded and sharded."""

    role: TrainedRole
    checkpointer: Checkpointer
    profiler: StepProfiler
    num_steps: int
    phases: PhaseClock


class RewardModelCheckpointer(Checkpointer):
    """Saves the checkpoints of a reward model, whose folders are sequence classifiers."""

    def __init__(self, config: RewardModelConfig, inputs: PairInputs, role: TrainedRole) -> None:
        super().__init__(inputs.run, inputs.strategy, [role], inputs.tokenizer, inputs.data, inputs.resume_point)
        self.flags = config
        # That of the model it started from is about generating.
        self.generation_config = None

    def hf_files(self, step: int) -> HFFiles:
        return HFFiles(self.tokenizer, None, reward_model_card(self.flags, step))


def check_pair_inputs(config: RewardModelConfig) -> PairInputs:
    """Raises ValueError, NotImplementedError or OSError for whatever a user can get wrong."""
    check_reward_model_config(config)
    check_devices()
    check_memory_snapshots(config.report)
    run, data, train = run_config(config), config.data, config.train
    strategy = get_strategy(run)
    model = load_classifier(config.model.pretrain, config.model.packing, new_head=True)
    check_length(model, config)
    tokenizer = load_tokenizer(config.model.pretrain)
    name_padding(model, tokenizer)
    check_same_flags(strategy.process_groups, config)
    pairs = load_pairs(data.train_data, data.train_split, tokenizer, data, data.max_samples)
    eval_pairs = None
    if data.eval_data is not None:
        eval_pairs = load_pairs(data.eval_data, data.eval_split, tokenizer, data, data.max_eval_samples)
    sampler = PairSampler(len(pairs), train.train_batch_size, train.num_epochs, train.seed)
    identity = pairs_identity(pairs, train.seed)
    resume_point = find_resume_point(run, log=is_rank_0())
    if resume_point is not None:
        check_same_models(resume_point, model_shapes(model))
        take_up_data(resume_point, sampler, identity, log=is_rank_0())
    check_same_contents(
        strategy.process_groups,
        {
            "pairs in the same order": (identity, pairs_identity(eval_pairs or ())),
            "model": model_identity(model),
            "checkpoint to go on from": resume_point and resume_point.state.step,
        },
        "Compare the files of the nodes.",
    )
    writer = open_writer(run, resume_point)
    return PairInputs(run, strategy, model, tokenizer, pairs, eval_pairs, sampler, identity, resume_point, writer)


def check_length(model: LoadedConfig, config: RewardModelConfig) -> None:
    context, max_len = context_length(model.hf_config), config.data.max_len
    if context is not None and max_len > context:
        raise ValueError(
            f"prompt and answer must fit into the model's context: max_len={max_len}, context {context}. "
            f"Lower --max_len to {context}."
        )


def name_padding(model: LoadedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """transformers' classifiers look for a sample's last token by the pad id; here nothing does."""
    if model.hf_config.pad_token_id is None:
        pad = tokenizer.pad_token_id
        model.hf_config.pad_token_id = tokenizer.eos_token_id if pad is None else pad


def pairs_identity(pairs: Iterable[PreferencePair], seed: int | None = None) -> str:
    """Hash of the pairs and of what else their order depends on."""
    digest = hashlib.sha256(repr(seed).encode())
    for pair in pairs:
        digest.update(repr((pair.row, pair.chosen_ids, pair.rejected_ids, pair.margin)).encode())
    return digest.hexdigest()


def model_shapes(loaded: LoadedConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each weight by its name in a checkpoint."""
    with torch.device("meta"):
        model = RewardModel(empty_model(loaded, "classifier", torch.float32))
    return {name: tuple(tensor.shape) for name, tensor in role_weights(ROLE, model).items()}


def assemble_pairs(config: RewardModelConfig, inputs: PairInputs) -> PairParts:
    """Loads and shards the model. Every rank must call it, with a strategy that is set up."""
    strategy, run = inputs.strategy, inputs.run
    torch.manual_seed(config.train.seed)
    done = 0 if inputs.resume_point is None else inputs.resume_point.state.step
    num_steps = steps_of_run(run, inputs.sampler, done)
    with strategy.collectives.collect("writing the configuration"):
        inputs.writer.write_config(dump_yaml(config))
    ledger = MemoryLedger(strategy.device)
    phases = PhaseClock(ProgressDisplay(num_steps, enabled=strategy.is_rank_0, course=COURSE), ledger)
    model = strategy.prepare_model(inputs.model, "classifier", RewardModel, trainable=True)
    role = strategy.prepare_optimizer(ROLE, model, config.optimizer.learning_rate, num_steps)
    if strategy.is_rank_0:
        for note in strategy.memory_notes():
            logger.info("%s", note)
    ledger.watch(lambda: strategy.device_bytes([role], {}))
    checkpointer = RewardModelCheckpointer(config, inputs, role)
    return PairParts(role, checkpointer, make_profiler(run, strategy, done + 1, num_steps), num_steps, phases)


def tokens_of(pairs: Sequence[PreferencePair], padded: bool) -> list[int]:
    """What each pair costs a forward: its two answers stand beside each other, in rows of equal length if padded."""
    lengths = [(len(pair.chosen_ids), len(pair.rejected_ids)) for pair in pairs]
    return [2 * max(pair) if padded else sum(pair) for pair in lengths]


def reward_model_card(config: Any, step: int) -> str:
    base = config.model.pretrain
    lines = "\n".join(f"{name}: {json.dumps(value)}" for name, value in flags_of(config).items())
    return f"""---
base_model: {json.dumps(base)}
library_name: transformers
pipeline_tag: text-classification
tags:
- lightrft
- reward-model
---

# A reward model, trained with LightRFT

`{base}` after {step} steps on pairs of a better and a worse answer. Its one label, at the last token, is the score.

Flags of the run:

```yaml
{lines}
```
"""
