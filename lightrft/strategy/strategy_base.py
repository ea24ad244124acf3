"""StrategyBase: what training backends share: process groups, engine lifecycle, dealing, the plan of forwards."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightrft.config import Config
from lightrft.models.loading import Kind, LoadedConfig
from lightrft.models.lora import SentWeight, adapter_tensors, engine_weights, sent_weights
from lightrft.models.weights import by_layer, sent_dtype
from lightrft.strategy.engine import ManagedEngine, create_engine
from lightrft.strategy.roles import RoleTensors, StepResult, TrainedRole, hf_model_of, stored_dtype
from lightrft.strategy.utils.broadcast_utils import BroadcastManager, SyncRecord
from lightrft.strategy.utils.collectives import Collectives
from lightrft.strategy.utils.dealing import Dealer
from lightrft.strategy.utils.devices import empty_cache, free_port, moved, rank_device, storage_bytes
from lightrft.strategy.utils.distributed_util import (
    extend_plan,
    local_share,
    plan_micro_batches,
    rollout_dp_groups,
    rollout_tp_groups,
)
from lightrft.strategy.utils.exit import end_after_uncaught_exception
from lightrft.strategy.utils.process_groups import ProcessGroups
from lightrft.strategy.utils.sync_plan import plan_buckets
from lightrft.strategy.utils.watch import GROUP_TIMEOUT_GRACE_SECONDS, start_watch
from lightrft.types import Experience, GenerationOutput, PromptExample, SamplingParams, Seeds, WeightBucket, WeightSpec

Plan: TypeAlias = list[list[int]]
T = TypeVar("T")


class StrategyBase(ABC):
    """One per process. Methods that say so must be called by every rank, in the same order."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.engine: ManagedEngine | None = None
        self._weight_version = 0
        timeout = config.strategy.dist_timeout_seconds
        self.group_timeout = timedelta(seconds=timeout + GROUP_TIMEOUT_GRACE_SECONDS)
        self.process_groups = ProcessGroups(self.group_timeout)
        self.nonfinite_in_a_row: dict[str, int] = {}
        """Steps that each role has skipped in a row, by its name."""

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
        # Where DeepSpeed is installed, accelerate imports it whatever the backend is; untold, it guesses aloud.
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        self._owns_group = not dist.is_initialized()
        if self._owns_group and self.device.type == "cuda":
            self.process_groups.join("cpu:gloo,cuda:nccl", self.device)
        elif self._owns_group:
            self.process_groups.join("gloo")
        self._undo_exit_hook = end_after_uncaught_exception()
        self.collectives = Collectives(self.device)
        self.dealer = Dealer(self.collectives)
        timeout = self.config.strategy.dist_timeout_seconds
        self.watch = start_watch(self.collectives, timeout, os.environ["MASTER_ADDR"])
        tp_size = self.config.rollout.engine_tp_size
        self.tp_group = self._new_groups(rollout_tp_groups(self.world_size, tp_size))
        self.dp_group = self._new_groups(rollout_dp_groups(self.world_size, tp_size))

    def _end_process_group(self) -> None:
        dist.destroy_process_group()

    def _new_groups(self, rank_lists: list[list[int]]) -> dist.ProcessGroup:
        """Creates every group of the list on every rank, and returns the one that holds this rank.

        Prompts and outputs travel through them, as objects: an NCCL communicator each would cost device memory.
        """
        groups = [dist.new_group(ranks, timeout=self.group_timeout, backend="gloo") for ranks in rank_lists]
        own = next(group for group, ranks in zip(groups, rank_lists, strict=True) if self.rank in ranks)
        assert isinstance(own, dist.ProcessGroup)
        return own

    def close(self) -> None:
        """Ends the watch, and the process groups that were made here. Every rank must call it."""
        self.collectives.barrier()
        self.watch.stop()
        self._undo_exit_hook()
        if self._owns_group:
            self._end_process_group()
            return
        # The caller's group goes on; these were made for this run, and each has threads.
        for group in (self.tp_group, self.dp_group):
            dist.destroy_process_group(group)

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
    def apply_gradients(self, role: TrainedRole, loss_is_finite: bool) -> float:
        """Clips to the global norm, steps optimizer and scheduler, and clears the gradients. Every rank must call it.

        Returns:
            The norm before clipping, equal on all ranks. Where it or a loss was not finite anywhere it is not finite
            either, and nothing but the gradients has changed.
        """

    @abstractmethod
    def full_tensors(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Whole tensors on this rank's device, cast, from its shards of some of a model's weights.

        They may be views of what they are made from, and are valid until that changes. Every rank must call it.
        """

    def full_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Shape of the weight of which `tensor` is this rank's shard."""
        return tuple(tensor.shape)

    @abstractmethod
    def offload_model(self, model: nn.Module) -> None:
        """Moves a role's weights to the host; nothing where they are there already, or stay by `memory_notes`."""

    @abstractmethod
    def reload_model(self, model: nn.Module) -> None:
        """Moves them back to this rank's device."""

    @abstractmethod
    def offload_optimizer(self, role: TrainedRole) -> None:
        """Moves the optimizer's state to the host; nothing where it is there already, or stays by `memory_notes`."""

    @abstractmethod
    def load_optimizer(self, role: TrainedRole) -> None:
        """Moves it to where the role's weights are, which come first."""

    @abstractmethod
    def memory_notes(self) -> list[str]:
        """What these flags ask for that this backend cannot move, for the log."""

    @abstractmethod
    def model_tensors(self, model: nn.Module) -> list[Tensor]:
        """What this rank holds of a role's weights and buffers, wherever it lives."""

    @abstractmethod
    def role_tensors(self, role: TrainedRole) -> RoleTensors:
        """What this rank holds of a role that learns, wherever it lives."""

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
        grad_norm = self.apply_gradients(role, bool(torch.isfinite(loss)))
        skipped = not math.isfinite(grad_norm)
        self._count_nonfinite(role.name, skipped, grad_norm)
        return StepResult(grad_norm, skipped)

    def _count_nonfinite(self, name: str, skipped: bool, grad_norm: float) -> None:
        self.nonfinite_in_a_row[name] = self.nonfinite_in_a_row.get(name, 0) + 1 if skipped else 0
        limit = self.config.optimizer.max_nonfinite_steps
        if skipped and self.nonfinite_in_a_row[name] >= limit:
            raise RuntimeError(
                f"{limit} {name} steps in a row had a loss or gradient norm that is not finite (last norm "
                f"{grad_norm}). Lower the learning rate, or raise --max_nonfinite_steps."
            )

    # Memory phases

    def on_device(self, model: nn.Module) -> AbstractContextManager[None]:
        """The role's weights are on the device inside the context, on the host outside."""
        return moved(lambda: self.reload_model(model), lambda: self.offload_model(model))

    def critic_on_device(self, critic: nn.Module | None) -> AbstractContextManager[None]:
        """`on_device` with --offload_critic."""
        if critic is None or not self.config.strategy.offload_critic:
            return nullcontext()
        return self.on_device(critic)

    def actor_off_device(self, actor: nn.Module) -> AbstractContextManager[None]:
        """With --offload_actor, the actor's weights are on the host inside the context, on the device outside."""
        if not self.config.strategy.offload_actor:
            return nullcontext()
        return moved(lambda: self.offload_model(actor), lambda: self.reload_model(actor))

    def optimizer_on_device(self, *roles: TrainedRole | None) -> AbstractContextManager[None]:
        """With --adam_offload, optimizer state is on the device inside the context, on the host outside."""
        if not self.config.strategy.adam_offload:
            return nullcontext()
        present = [role for role in roles if role is not None]

        def each(move: Callable[[TrainedRole], None]) -> None:
            for role in present:
                move(role)

        return moved(lambda: each(self.load_optimizer), lambda: each(self.offload_optimizer))

    def device_bytes(self, roles: Sequence[TrainedRole], frozen: Mapping[str, nn.Module]) -> dict[str, int]:
        """Bytes on this rank's device by owner: weights of each role, gradients, optimizer state, and the engine's."""
        held: dict[str, int] = {}
        for role in roles:
            tensors = self.role_tensors(role)
            held[f"{role.name} weights"] = storage_bytes(tensors.weights, self.device)
            held[f"{role.name} gradients"] = storage_bytes(tensors.gradients, self.device)
            held[f"{role.name} optimizer"] = storage_bytes(tensors.optimizer, self.device)
        for name, model in frozen.items():
            held[f"{name} weights"] = storage_bytes(self.model_tensors(model), self.device)
        if self.engine is not None:
            held |= {f"engine {name}": size for name, size in self.engine.device_bytes().items()}
        return held

    # Weights by name

    def weight_specs(self, weights: Sequence[SentWeight], dtype: torch.dtype) -> list[WeightSpec]:
        """What `weight_buckets` gives, in its order."""
        return [
            WeightSpec(weight.name, self.full_shape(weight.tensor), sent_dtype(weight.tensor, dtype))
            for weight in weights
        ]

    def weight_buckets(
        self, weights: Sequence[SentWeight], dtype: torch.dtype, indices: Sequence[int] | None = None
    ) -> Iterator[WeightBucket]:
        """Full weights, or those with these indices, in the buckets of `plan_buckets`, valid until the model's change.

        Each next() is a collective: every rank drains the iterator.
        """
        weights = weights if indices is None else [weights[i] for i in indices]
        sizes = [spec.num_bytes for spec in self.weight_specs(weights, dtype)]
        for run in plan_buckets(sizes, self.config.rollout.weight_bucket_bytes):
            # Nothing here may hold on to a bucket that the caller has dropped.
            yield self._bucket(weights[run.start : run.stop], dtype)

    def named_weights(self, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All weights of `weight_buckets` by Hugging Face name. Some next() are a collective."""
        for bucket in self.weight_buckets(sent_weights(hf_model_of(model)), dtype):
            yield from bucket

    def named_adapter(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Full weights of the adapter that learns, by their names in the model. Some next() are a collective."""
        for block in by_layer(adapter_tensors(hf_model_of(model))):
            names, tensors = zip(*block, strict=True)
            yield from zip(names, self.full_tensors(tensors, [tensor.dtype for tensor in tensors]), strict=True)

    def _bucket(self, weights: Sequence[SentWeight], dtype: torch.dtype) -> WeightBucket:
        parts = [weight.parts(dtype) for weight in weights]
        tensors, dtypes = zip(*chain.from_iterable(parts), strict=True)
        whole = iter(self.full_tensors(tensors, dtypes))
        return [(w.name, w.made(list(islice(whole, len(p))), dtype)) for w, p in zip(weights, parts, strict=True)]

    # Rollout engine

    def create_engine(self, tokenizer: PreTrainedTokenizerBase) -> ManagedEngine:
        """Builds the engine without weights; `update_engine_weights` brings them."""
        engine = create_engine(self.config, tokenizer, self.device, self.collectives, self.tp_group)
        self.use_engine(engine)
        return engine

    def use_engine(self, engine: ManagedEngine) -> None:
        """Takes an engine that is there, built by a strategy of the same ranks."""
        self.engine = engine
        rollout = self.config.rollout
        self._broadcast_manager = BroadcastManager(
            engine, self.collectives, self.device, rollout.weight_bucket_bytes, rollout.weight_check
        )

    @property
    def engine_dtype(self) -> torch.dtype:
        return stored_dtype(self.config, trainable=False)

    def register_actor(self, actor: nn.Module) -> None:
        """The actor whose weights an engine gets that is asked to generate after it dropped its own."""
        self._engine().register_sync(lambda: self.update_engine_weights(actor))

    @property
    def weight_version(self) -> int:
        """Number of the last weight sync."""
        return self._weight_version

    def update_engine_weights(self, actor: nn.Module) -> SyncRecord:
        """Installs the actor's weights in the engine. Every rank must call it."""
        self._weight_version += 1
        # An engine may take its memory outside torch's allocator: what the trainer has left must be free for it.
        empty_cache(self.device)
        weights = engine_weights(hf_model_of(actor))
        specs = self.weight_specs(weights, self.engine_dtype)
        buckets = partial(self.weight_buckets, weights, self.engine_dtype)
        with torch.no_grad():
            record = self._broadcast_manager.broadcast_to_engine(specs, buckets, self._weight_version)
        empty_cache(self.device)
        return record

    def gather_and_generate(
        self, prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds
    ) -> list[list[GenerationOutput]]:
        """Samples `len(seeds[i])` responses of each of this rank's prompts. Every rank must call it.

        The ranks of a rollout group gather their prompts, generate together, and each takes its own share back.
        """
        gathered = self.collectives.all_gather_objects((list(prompts), list(seeds)), self.tp_group)
        all_prompts = [prompt for member, _ in gathered for prompt in member]
        all_seeds = [seed for _, member in gathered for seed in member]
        empty_cache(self.device)
        with self.collectives.collect("engine wake-up"):
            self._engine().wake_up()
        outputs = self._engine().generate(all_prompts, params, all_seeds)
        start = sum(len(member) for member, _ in gathered[: dist.get_rank(self.tp_group)])
        return outputs[start : start + len(prompts)]

    def sleep_engine(self) -> None:
        """Frees what the engine's sleep level says. Every rank must call it."""
        with self.collectives.collect("engine sleep"):
            self._engine().sleep()
        empty_cache(self.device)

    def _engine(self) -> ManagedEngine:
        assert self.engine is not None, "create_engine comes first"
        return self.engine

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
        return self.agree_plan_of_lengths([sample.num_tokens for sample in samples], padded)

    def agree_plan_of_lengths(self, lengths: Sequence[int], padded: bool) -> Plan:
        """`agree_plan` for whatever has these numbers of tokens. Every rank must call it."""
        train = self.config.train
        plan = plan_micro_batches(lengths, train.max_tokens_per_micro_batch, train.micro_train_batch_size, padded)
        [count] = self.collectives.all_reduce_max([len(plan)])
        return extend_plan(plan, int(count), lengths)
