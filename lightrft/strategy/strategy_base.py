"""StrategyBase: what training backends share: process groups, engine lifecycle, dealing, the plan of forwards."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightrft.config import Config, OptimizerConfig
from lightrft.models.loading import Kind, LoadedConfig
from lightrft.strategy.engine import ManagedEngine, create_engine
from lightrft.strategy.utils.broadcast_utils import BroadcastManager
from lightrft.strategy.utils.checkpoint import HFFiles, export_hf
from lightrft.strategy.utils.checkpoint_folder import discard, open_partial, partial_of, publish
from lightrft.strategy.utils.collectives import Collectives, PhaseError
from lightrft.strategy.utils.dealing import Dealer
from lightrft.strategy.utils.devices import empty_cache, free_port, rank_device
from lightrft.strategy.utils.distributed_util import (
    extend_plan,
    local_share,
    plan_micro_batches,
    rollout_dp_groups,
    rollout_tp_groups,
)
from lightrft.strategy.utils.exit import end_after_uncaught_exception
from lightrft.strategy.utils.watch import start_watch
from lightrft.types import Experience, GenerationOutput, PromptExample, SamplingParams, Seeds, WeightSpec
from lightrft.utils.logging import get_logger
from lightrft.utils.rng import rng_state, set_rng_state

logger = get_logger(__name__)

Plan: TypeAlias = list[list[int]]
T = TypeVar("T")

ROLES, HF, PROGRESS = "roles", "hf", "progress.pt"
"""In a checkpoint: sharded weights and optimizer state, the exported model, and what else the strategy keeps."""
GROUP_TIMEOUT_GRACE_SECONDS = 30.0
"""Process groups wait this much longer than the watch, which can say who is missing."""


@dataclass(frozen=True)
class TrainedRole:
    """A model that learns, with what makes it learn."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step, equal on all ranks."""

    grad_norm: float
    """Global norm before clipping; not finite where the step was skipped for it."""
    skipped: bool


class StrategyBase(ABC):
    """One per process. Methods that say so must be called by every rank, in the same order."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.engine: ManagedEngine | None = None
        self._weight_version = 0
        self._nonfinite_in_a_row: dict[str, int] = {}

    # Process groups

    def setup_distributed(self) -> None:
        """Joins the process group that torchrun's variables describe, or a group of one without them."""
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        if "MASTER_PORT" not in os.environ:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.device = rank_device(int(os.environ["LOCAL_RANK"]))
        timeout = self.config.strategy.dist_timeout_seconds
        self.group_timeout = timedelta(seconds=timeout + GROUP_TIMEOUT_GRACE_SECONDS)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            self._init_process_group()
        self._undo_exit_hook = end_after_uncaught_exception()
        self.collectives = Collectives(self.device)
        self.dealer = Dealer(self.collectives)
        self.watch = start_watch(self.collectives, timeout, os.environ["MASTER_ADDR"])
        tp_size = self.config.rollout.engine_tp_size
        self.tp_group = self._new_groups(rollout_tp_groups(self.world_size, tp_size))
        self.dp_group = self._new_groups(rollout_dp_groups(self.world_size, tp_size))

    def _init_process_group(self) -> None:
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        device_id = self.device if self.device.type == "cuda" else None
        dist.init_process_group(backend, timeout=self.group_timeout, device_id=device_id)

    def _new_groups(self, rank_lists: list[list[int]]) -> dist.ProcessGroup:
        """Creates every group of the list on every rank, and returns the one that holds this rank.

        Prompts and outputs travel through them, as objects: an NCCL communicator each would cost device memory.
        """
        groups = [dist.new_group(ranks, timeout=self.group_timeout, backend="gloo") for ranks in rank_lists]
        own = next(group for group, ranks in zip(groups, rank_lists, strict=True) if self.rank in ranks)
        assert isinstance(own, dist.ProcessGroup)
        return own

    def close(self) -> None:
        """Ends the watch, and the process group where it was made here. Every rank must call it."""
        self.collectives.barrier()
        self.watch.stop()
        self._undo_exit_hook()
        if self._owns_group:
            dist.destroy_process_group()

    @property
    def is_rank_0(self) -> bool:
        return self.rank == 0

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """A site that ends when the device has done its work, so that the watch sees a rank which hangs in it."""
        with self.collectives.site(name):
            yield
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()

    # Models: what a backend supplies

    @abstractmethod
    def prepare_model(
        self,
        loaded: LoadedConfig,
        kind: Kind,
        build: Callable[[PreTrainedModel], nn.Module],
        trainable: bool,
    ) -> nn.Module:
        """The role that `build` makes around a pretrained model, sharded, with its weights. Every rank must call it."""

    @abstractmethod
    def prepare_optimizer(self, name: str, model: nn.Module, learning_rate: float, num_steps: int) -> TrainedRole: ...

    @abstractmethod
    def backward(self, loss: Tensor, role: TrainedRole, is_last: bool) -> None:
        """Adds the gradient of `loss`, averaged over ranks. Every rank must call it equally often."""

    @abstractmethod
    def clip_grad_norm(self, role: TrainedRole, loss_is_finite: bool) -> float:
        """Clips to the global norm and returns it, equal on all ranks; NaN if a loss was not finite anywhere."""

    @abstractmethod
    def weight_specs(self, model: nn.Module, dtype: torch.dtype) -> list[WeightSpec]: ...

    @abstractmethod
    def named_weights(self, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Full weights by Hugging Face name. Each next() is a collective: every rank drains the iterator."""

    @abstractmethod
    def on_device(self, model: nn.Module) -> AbstractContextManager[None]:
        """A frozen role is on the device inside the context, on the host outside."""

    @abstractmethod
    def optimizer_on_device(self, *roles: TrainedRole | None) -> AbstractContextManager[None]:
        """With --adam_offload, optimizer state is on the device inside the context, on the host outside."""

    @abstractmethod
    def save_roles(self, folder: Path, roles: Sequence[TrainedRole]) -> None:
        """Writes weights and optimizer state, each rank its shards. Every rank must call it.

        Raises:
            PhaseError: On all ranks, if any could not write.
        """

    @abstractmethod
    def load_roles(self, folder: Path, roles: Sequence[TrainedRole]) -> None:
        """Reads what `save_roles` wrote on any number of ranks. Every rank must call it."""

    # Optimisation

    def optimizer_step(self, role: TrainedRole, loss: Tensor) -> StepResult:
        """Clips, steps optimizer and scheduler, and clears the gradients. Every rank must call it.

        Args:
            loss: This rank's loss, summed over its micro-batches.

        Raises:
            RuntimeError: On all ranks, after `max_nonfinite_steps` steps in a row without a finite loss and norm.
        """
        grad_norm = self.clip_grad_norm(role, bool(torch.isfinite(loss)))
        skipped = not torch.isfinite(torch.tensor(grad_norm))
        if not skipped:
            role.optimizer.step()
            role.scheduler.step()
        role.optimizer.zero_grad(set_to_none=True)
        self._count_nonfinite(role.name, skipped, grad_norm)
        return StepResult(grad_norm, bool(skipped))

    def _count_nonfinite(self, name: str, skipped: bool, grad_norm: float) -> None:
        self._nonfinite_in_a_row[name] = self._nonfinite_in_a_row.get(name, 0) + 1 if skipped else 0
        limit = self.config.optimizer.max_nonfinite_steps
        if skipped and self._nonfinite_in_a_row[name] >= limit:
            raise RuntimeError(
                f"{limit} {name} steps in a row had a loss or gradient norm that is not finite (last norm "
                f"{grad_norm}). Lower the learning rate, or raise --max_nonfinite_steps."
            )

    # Rollout engine

    def create_engine(self, tokenizer: PreTrainedTokenizerBase) -> ManagedEngine:
        """Builds the engine without weights; `update_engine_weights` brings them."""
        self.engine = create_engine(self.config, tokenizer, self.device, self.collectives, self.tp_group)
        self._broadcast_manager = BroadcastManager(self.engine, self.collectives)
        return self.engine

    @property
    def engine_dtype(self) -> torch.dtype:
        return stored_dtype(self.config, trainable=False)

    def register_actor(self, actor: nn.Module) -> None:
        """The actor whose weights an engine gets that is asked to generate after it dropped its own."""
        self._engine().register_sync(lambda: self.update_engine_weights(actor))

    def update_engine_weights(self, actor: nn.Module) -> None:
        """Installs the actor's weights in the engine. Every rank must call it."""
        self._weight_version += 1
        with torch.no_grad():
            self._broadcast_manager.broadcast_to_engine(
                self.weight_specs(actor, self.engine_dtype),
                self.named_weights(actor, self.engine_dtype),
                self._weight_version,
            )
        empty_cache(self.device)

    def gather_and_generate(
        self, prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds
    ) -> list[list[GenerationOutput]]:
        """Samples `len(seeds[i])` responses of each of this rank's prompts. Every rank must call it.

        The ranks of a rollout group gather their prompts, generate together, and each takes its own share back.
        """
        gathered = self.collectives.all_gather_objects((list(prompts), list(seeds)), self.tp_group)
        all_prompts = [prompt for member, _ in gathered for prompt in member]
        all_seeds = [seed for _, member in gathered for seed in member]
        with self.collectives.collect("engine wake-up"):
            self._engine().wake_up()
        outputs = self._engine().generate(all_prompts, params, all_seeds)
        start = sum(len(member) for member, _ in gathered[: dist.get_rank(self.tp_group)])
        return outputs[start : start + len(prompts)]

    def sleep_engine(self) -> None:
        self._engine().sleep()
        empty_cache(self.device)

    def _engine(self) -> ManagedEngine:
        assert self.engine is not None, "create_engine comes first"
        return self.engine

    # Checkpoints

    def save_checkpoint(
        self,
        folder: Path,
        roles: Sequence[TrainedRole],
        write_files: Callable[[Path], None],
        export: Callable[[Path], None] | None = None,
    ) -> None:
        """Writes a complete checkpoint, or leaves nothing of it. Every rank must call it.

        Args:
            folder: On a file system that all ranks share.
            roles: Models with their optimizers and schedulers.
            write_files: Adds the caller's own files to the folder that it gets, on rank 0 alone.
            export: Adds a model's folder at the path that it gets; it is called on every rank.

        Raises:
            PhaseError: On all ranks, if any could not write.
        """
        partial = partial_of(folder)
        try:
            with self.collectives.collect(f"opening {folder}"):
                if self.is_rank_0:
                    open_partial(folder)
            with self.collectives.collect(f"opening {folder}"):
                if not partial.is_dir():
                    raise OSError(f"checkpoints need a file system that all nodes share: {partial} is not there.")
            self.save_roles(partial / ROLES, roles)
            if export is not None:
                export(partial / HF)
            states = self.collectives.all_gather_objects(rng_state(self.device))
            with self.collectives.collect(f"writing {folder}"):
                if self.is_rank_0:
                    torch.save(self._progress(roles) | {"rng": states}, partial / PROGRESS)
                    write_files(partial)
                    publish(folder)
        except PhaseError:
            if self.is_rank_0:
                discard(partial)
            raise

    def load_checkpoint(self, folder: Path, roles: Sequence[TrainedRole]) -> None:
        """Restores models, optimizers, schedulers and random states. Every rank must call it."""
        names = self.collectives.all_gather_objects(folder.name)
        if len(set(names)) > 1:
            raise RuntimeError(f"ranks must load the same checkpoint: they found {', '.join(names)}.")
        self.load_roles(folder / ROLES, roles)
        with self.collectives.collect(f"reading {folder}"):
            saved = torch.load(folder / PROGRESS, weights_only=True)
        for role in roles:
            set_scheduler_steps(role.scheduler, saved["scheduler_steps"][role.name])
        self._nonfinite_in_a_row = saved["nonfinite_in_a_row"]
        states = saved["rng"]
        if len(states) != self.world_size and self.is_rank_0:
            # Sampling and minibatches are keyed, so results do not depend on these states.
            logger.info(
                "%s was saved at WORLD_SIZE=%d and is loaded at %d: all ranks take the random states of rank 0",
                folder.name,
                len(states),
                self.world_size,
            )
        set_rng_state(states[self.rank if len(states) == self.world_size else 0], self.device)

    def _progress(self, roles: Sequence[TrainedRole]) -> dict[str, dict[str, int]]:
        steps = {role.name: role.scheduler.last_epoch for role in roles}
        return {"scheduler_steps": steps, "nonfinite_in_a_row": self._nonfinite_in_a_row}

    def save_pretrained(self, actor: nn.Module, files: HFFiles, folder: Path) -> None:
        """Writes the actor as a Hugging Face folder, in the engine's dtype. Every rank must call it."""
        kept: list[tuple[str, Tensor]] = []
        with torch.no_grad():
            for name, tensor in self.named_weights(actor, self.engine_dtype):
                if self.is_rank_0:
                    kept.append((name, tensor.to("cpu", copy=True)))
        with self.collectives.collect(f"saving {folder}"):
            if self.is_rank_0:
                export_hf(hf_model_of(actor), kept, self.engine_dtype, files, folder)

    # Shares of samples and the plan of forwards

    def local_share(self, count: int) -> range:
        """This rank's part of `count` items: contiguous, and sizes differ by at most one."""
        return local_share(count, self.rank, self.world_size)

    def exchange(self, records: Sequence[T], destinations: Sequence[int]) -> list[T]:
        """Sends record i to rank `destinations[i]`; returns what came here by source. Every rank must call it."""
        return self.dealer.exchange(records, destinations)

    def agree_plan(self, samples: Sequence[Experience], padded: bool) -> Plan:
        """Micro-batches as indices into `samples`, equally many on all ranks. Every rank must call it.

        An empty micro-batch stands for a forward that this rank runs for its collectives alone.
        """
        train = self.config.train
        lengths = [sample.num_tokens for sample in samples]
        plan = plan_micro_batches(lengths, train.max_tokens_per_micro_batch, train.micro_train_batch_size, padded)
        [count] = self.collectives.all_reduce_max([len(plan)])
        return extend_plan(plan, int(count), lengths)


def stored_dtype(config: Config, trainable: bool) -> torch.dtype:
    """The dtype in which the weights of a role, or of the engine, are held."""
    return torch.bfloat16 if config.model.bf16 and not trainable else torch.float32


def set_scheduler_steps(scheduler: LRScheduler, num_steps: int) -> None:
    """Makes a schedule, of the present flags, stand behind `num_steps` steps; the optimizer's rates follow."""
    if num_steps == 0:
        return
    # PyTorch warns of a first step before the optimizer's own, and this optimizer may not have stepped yet.
    scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": num_steps - 1, "_step_count": num_steps + 1})
    scheduler.step()


def warmup_steps(options: OptimizerConfig, num_steps: int) -> int:
    """Optimizer steps of `num_steps` over which the learning rate rises."""
    if options.lr_warmup_steps is not None:
        return options.lr_warmup_steps
    return round(options.lr_warmup_ratio * num_steps)


def hf_model_of(role: nn.Module) -> PreTrainedModel:
    """The transformers model inside a role."""
    model = role.get_submodule("model")
    assert isinstance(model, PreTrainedModel)
    return model
