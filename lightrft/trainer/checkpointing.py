"""Checkpointing: what a run saves besides its models, which checkpoints it keeps, and from which one it goes on."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from lightrft.config import Config
from lightrft.config.flags import flag_values
from lightrft.models.loading import load_generation_config
from lightrft.models.lora import Adapter, adapter_config, has_adapter_config, read_adapter_config, write_adapter_config
from lightrft.strategy.checkpoints import ROLES, load_checkpoint, save_adapter, save_checkpoint, save_pretrained
from lightrft.strategy.roles import TrainedRole, hf_model_of
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.checkpoint import HFFiles, write_hf_files
from lightrft.strategy.utils.checkpoint_folder import (
    checkpoint_name,
    complete_checkpoints,
    delete,
    newest_complete,
    sweep,
)
from lightrft.strategy.utils.collectives import PhaseError
from lightrft.strategy.utils.sharded_state import saved_shapes, shape_faults
from lightrft.types import PromptExample
from lightrft.utils.logging import get_logger
from lightrft.utils.metrics import jsonable, write_json
from lightrft.utils.sampler import PromptSampler

logger = get_logger(__name__)

Library: TypeAlias = Literal["transformers", "peft"]

STATE, BASE = "trainer.json", "base"
"""In a checkpoint: the run's own state, and what a Hugging Face folder needs besides the weights."""
SCORES = ("eval/mean", "reward/mean", "eval/accuracy")
"""Metrics by which a checkpoint is the best; one with an earlier of them comes before all without it. The last is that
of a reward model, which has no other."""


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands after a step; JSON types only."""

    step: int
    num_steps: int
    """Steps of the whole run, as it was meant then."""
    train_seconds: float
    kl_coefficient: float
    sampler: Mapping[str, int]
    data: str
    """Identity of the prompts and their order."""
    scores: Mapping[str, float]
    """Those of `SCORES` that the step has."""
    before: Mapping[str, float]
    """Metrics of the evaluation before the first step."""
    after: Mapping[str, float]
    """Metrics of the last evaluation after that."""
    best: Mapping[str, float]
    """Reward and step of the best evaluation."""
    flags: Mapping[str, Any]
    reward_moments: Sequence[float] = (0.0, 0.0, 0.0)
    """(sum, sum of squares, count) of the run's rewards, for --reward_running_norm."""


@dataclass(frozen=True)
class ResumePoint:
    """A complete checkpoint, and what it says."""

    folder: Path
    state: TrainingState


class Checkpointer:
    """Saves the checkpoints of one run. Every rank has one, and calls it alike.

    Args:
        config: All flags.
        strategy: Writes and reads models.
        roles: The trained models; the actor is the first.
        tokenizer: Goes into every exported model.
        data: Identity of the prompts and their order.
        resume_point: Where the run goes on; None starts it.
        processor: Goes into every exported model that takes media.
    """

    def __init__(
        self,
        config: Config,
        strategy: StrategyBase,
        roles: Sequence[TrainedRole],
        tokenizer: PreTrainedTokenizerBase,
        data: str,
        resume_point: ResumePoint | None,
        processor: ProcessorMixin | None = None,
    ) -> None:
        self.config = config
        self.flags: Any = config
        """Whose flags are kept: a Config, or another dataclass of owners."""
        self.root = checkpoint_root(config)
        self.saves = saves_checkpoints(config)
        self.strategy = strategy
        self.roles = roles
        self.tokenizer = tokenizer
        self.processor = processor
        self.generation_config = load_generation_config(config.model.pretrain)
        self.data = data
        self.resume_point = resume_point
        self.num_failed = 0

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether a checkpoint is saved after this step; the run's last one always is."""
        every = self.config.checkpoint.save_steps
        return self.saves and (is_last or (every > 0 and step % every == 0))

    def save(self, state: TrainingState) -> bool:
        """Saves a checkpoint, and deletes those that it replaces. One that cannot be saved does not end the run.

        Returns:
            Whether it was saved, the same on all ranks.
        """
        folder = self.root / checkpoint_name(state.step)
        export = partial(self.export, state.step) if self.config.checkpoint.save_hf_ckpt else None
        try:
            save_checkpoint(self.strategy, folder, self.roles, partial(self.write_files, state), export)
        except PhaseError:
            self.num_failed += 1
            self.report_failure(folder)
            return False
        if self.strategy.is_rank_0:
            logger.info("saved %s", folder)
            self.delete_others(state.step)
        return True

    def load(self) -> TrainingState | None:
        """Restores models, optimizers, schedules and random states; None where the run starts."""
        if self.resume_point is None:
            return None
        folder, state = self.resume_point.folder, self.resume_point.state
        load_checkpoint(self.strategy, folder, self.roles)
        if self.strategy.is_rank_0:
            logger.info("going on from %s: step %d of %d is done", folder, state.step, state.num_steps)
            if changes := changed_flags(state, self.flags):
                logger.info("flags that the checkpoint's run had otherwise: %s", "; ".join(changes))
        return state

    def export(self, step: int, folder: Path) -> None:
        """Writes the actor as a Hugging Face folder, or its adapter as a peft folder. Every rank must call it."""
        save = save_adapter if self.config.checkpoint.save_adapter else save_pretrained
        save(self.strategy, self.roles[0].model, self.hf_files(step), folder)

    def hf_files(self, step: int) -> HFFiles:
        library: Library = "peft" if self.config.checkpoint.save_adapter else "transformers"
        card = model_card(self.config.model.pretrain, step, flags_of(self.flags), library)
        return HFFiles(self.tokenizer, self.generation_config, card, self.processor)

    def write_files(self, state: TrainingState, folder: Path) -> None:
        write_json(folder / STATE, asdict(state))
        hf_model = hf_model_of(self.roles[0].model)
        hf_model.config.save_pretrained(folder / BASE)
        if self.config.model.trains_adapter:
            write_adapter_config(adapter_config(hf_model), folder / BASE)
        write_hf_files(self.hf_files(state.step), folder / BASE)

    def delete_others(self, step: int) -> None:
        try:
            sweep(self.root, step)
            found = complete_checkpoints(self.root)
            num_newest = self.config.checkpoint.max_ckpt_num
            kept = kept_steps({s: read_state(folder).scores for s, folder in found.items()}, num_newest)
            for other in found.keys() - kept:
                delete(found[other])
        except OSError as error:
            logger.warning("old checkpoints in %s could not be deleted: %s", self.root, error)

    def report_failure(self, folder: Path) -> None:
        if not self.strategy.is_rank_0:
            return
        last, _ = newest_complete(self.root)
        logger.exception(
            "%s could not be saved, and training goes on (%.2f GiB are free there). %s",
            folder,
            shutil.disk_usage(_existing(folder)).free / 2**30,
            "There is no complete checkpoint yet." if last is None else f"The last complete one is {last.name}.",
        )

    def metrics(self) -> dict[str, float]:
        return {"checkpoint/failed": self.num_failed} if self.saves else {}


def checkpoint_root(config: Config) -> Path:
    return Path(config.checkpoint.ckpt_path or Path(config.train.save_path) / "checkpoints")


def saves_checkpoints(config: Config) -> bool:
    return config.checkpoint.save_steps > 0 or config.checkpoint.ckpt_path is not None


def kept_steps(scores: Mapping[int, Mapping[str, float]], num_newest: int) -> set[int]:
    """Steps of the newest checkpoints and of the best one.

    Args:
        scores: Of each checkpoint's step, those of `SCORES` that it has.
        num_newest: How many of the newest are kept.
    """
    kept = set(sorted(scores)[-num_newest:])
    for name in SCORES:
        scored = [(values[name], step) for step, values in scores.items() if name in values]
        if scored:
            return kept | {max(scored)[1]}
    return kept


def scores_of(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in SCORES if name in metrics}


def read_state(folder: Path) -> TrainingState:
    return TrainingState(**json.loads((folder / STATE).read_text(encoding="utf-8")))


def find_resume_point(config: Config, log: bool) -> ResumePoint | None:
    """The newest complete checkpoint, where --load_checkpoint asks for it and there is one.

    Args:
        config: All flags.
        log: Whether this process says what it has found.
    """
    if not config.checkpoint.load_checkpoint:
        return None
    root = checkpoint_root(config)
    folder, refused = newest_complete(root)
    taken = "the run starts at step 0" if folder is None else f"the run goes on from {folder.name}"
    for path, reason in refused.items() if log else ():
        logger.warning("%s is not used, since %s: %s", path, reason, taken)
    if folder is None:
        if log:
            logger.warning("load_checkpoint found no complete checkpoint in %s: %s", root, taken)
        return None
    return ResumePoint(folder, read_state(folder))


def check_same_models(point: ResumePoint, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError unless the checkpoint holds weights of these names and shapes, and no others."""
    faults = shape_faults(saved_shapes(point.folder / ROLES), wanted)
    if faults:
        others = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ValueError(
            f"a run goes on with the models of its checkpoint: {point.folder} is of other ones: {faults[0]}{others}. "
            "Set its --pretrain, --critic_pretrain, --advantage_estimator and --lora_rank, or drop --load_checkpoint."
        )


def check_same_scale(point: ResumePoint, adapter: Adapter | None) -> None:
    """Raises ValueError where the weights of the checkpoint's adapter would stand for another policy here."""
    if adapter is None or not has_adapter_config(point.folder / BASE):
        return
    saved, here = (settings.to_dict() for settings in (read_adapter_config(point.folder / BASE), adapter.config))
    for name in ("lora_alpha", "use_rslora", "alpha_pattern"):
        if saved[name] != here[name]:
            raise ValueError(
                f"a run goes on with the adapter of its checkpoint: {name} is {saved[name]} in {point.folder} and "
                f"{here[name]} here. Set it as it was, or drop --load_checkpoint."
            )


def take_up_data(point: ResumePoint, sampler: PromptSampler, data: str, log: bool) -> None:
    """Sets the sampler to the checkpoint's place, or leaves it at the start of another data set.

    Raises:
        ValueError: The place is not the start of a batch.
    """
    if point.state.data == data:
        sampler.load_state_dict(dict(point.state.sampler))
    elif log:
        logger.warning(
            "the prompts or their order (data, seed, tail_batch) are not those of %s: the data start at 0",
            point.folder.name,
        )


def data_identity(prompts: Iterable[PromptExample], *order: object) -> str:
    """Hash of the prompts and of what else their order depends on."""
    digest = hashlib.sha256(repr(order).encode())
    for example in prompts:
        digest.update(repr((example.row, example.prompt, example.label)).encode("utf-8", errors="backslashreplace"))
    return digest.hexdigest()


def changed_flags(state: TrainingState, config: Any) -> list[str]:
    """`name: old -> new` of each flag that the checkpoint's run had otherwise."""
    saved = state.flags
    return [
        f"{name}: {saved.get(name)} -> {value}"
        for name, value in flags_of(config).items()
        if name != "load_checkpoint" and saved.get(name) != value
    ]


def flags_of(config: Any) -> dict[str, Any]:
    """Every flag's value in JSON's types."""
    return jsonable(flag_values(config))


def model_card(base: str, step: int, flags: Mapping[str, Any], library: Library = "transformers") -> str:
    """Text of an exported model's card."""
    lines = "\n".join(f"{name}: {json.dumps(value)}" for name, value in flags.items())
    return f"""---
base_model: {json.dumps(base)}
library_name: {library}
pipeline_tag: text-generation
tags:
- lightrft
- reinforcement-learning
---

# {Path(base).name}, trained with LightRFT

`{base}` after {step} steps of reinforcement learning with LightRFT.

Flags of the run:

```yaml
{lines}
```
"""


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())
