"""The rollout engine as the rest of the package sees it: its protocol, its states, and how one is built."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from lightrft.config.arguments import Config
from lightrft.models.loading import LoadedConfig
from lightrft.strategy.sglang_utils.preconditions import check_sglang
from lightrft.strategy.utils.collectives import Collectives
from lightrft.strategy.utils.watch import GROUP_TIMEOUT_GRACE_SECONDS
from lightrft.strategy.vllm_utils.preconditions import check_vllm
from lightrft.types import GenerationOutput, PromptExample, SamplingParams, Seeds, WeightBucket, WeightSpec


class RolloutEngine(Protocol):
    """What an adapter implements. `ManagedEngine` alone calls it, and keeps the order of calls right."""

    @property
    def staging_bytes(self) -> int:
        """What a round of updates takes of this rank's device beside the buckets."""
        ...

    def generate(
        self, prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds
    ) -> list[list[GenerationOutput]]:
        """`len(seeds[i])` samples of prompt i. Every rank of a rollout group calls it alike and gets all results."""
        ...

    def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        """Opens a round of updates.

        Raises:
            ValueError: A name or shape does not match the engine's, named before the first bucket is sent.
        """
        ...

    def update_weights(self, bucket: WeightBucket) -> None:
        """Copies the bucket's tensors; they stay the caller's. An error may come with a later call of the round."""
        ...

    def verify_weights(self, bucket: WeightBucket) -> list[str]:
        """Loads weights once more that the engine should hold already, within the round.

        Returns:
            Names of those whose loading changed a bit of the engine's memory, or reached none of it.
        """
        ...

    def finish_weight_update(self, version: int) -> None:
        """Closes the round and drops every cache that the old weights made.

        Raises:
            RuntimeError: A weight got no update in this round, named.
        """
        ...

    def sleep(self) -> None:
        """Frees the memory that the engine's sleep level says."""
        ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes memory back for `weights`, `kv_cache`, or both. Dropped weights come back without values."""
        ...

    def device_bytes(self) -> dict[str, int]:
        """Bytes held on this rank's device now: `weights`, `kv_cache`, and `cuda_graphs` where the engine tells."""
        ...


class EngineState(Enum):
    AWAKE = "awake"
    WEIGHTS = "weights"
    """Current weights on the device, no KV cache."""
    KV_ASLEEP = "kv_asleep"
    """No KV cache; the weights are kept, but may be stale."""
    DROPPED = "dropped"
    """Neither; the weights are lost."""


Operation: TypeAlias = Literal["sleep_1", "sleep_2", "sync", "sync_resident", "generate", "wake_weights", "wake_up"]
"""`sync_resident` is the sync of an engine that never sleeps."""

_AWAKE, _WEIGHTS, _KV_ASLEEP, _DROPPED = EngineState

TRANSITIONS: dict[tuple[EngineState, Operation], EngineState] = {
    (_AWAKE, "sleep_1"): _KV_ASLEEP,
    (_AWAKE, "sleep_2"): _DROPPED,
    (_AWAKE, "sync"): _WEIGHTS,
    (_AWAKE, "sync_resident"): _AWAKE,
    (_AWAKE, "generate"): _AWAKE,
    (_AWAKE, "wake_weights"): _AWAKE,
    (_AWAKE, "wake_up"): _AWAKE,
    (_WEIGHTS, "sleep_1"): _KV_ASLEEP,
    (_WEIGHTS, "sleep_2"): _WEIGHTS,  # Dropping what was just synced would cost another sync before the next generate.
    (_WEIGHTS, "sync"): _WEIGHTS,
    (_WEIGHTS, "generate"): _AWAKE,
    (_WEIGHTS, "wake_weights"): _WEIGHTS,
    (_WEIGHTS, "wake_up"): _AWAKE,
    (_KV_ASLEEP, "sleep_1"): _KV_ASLEEP,
    (_KV_ASLEEP, "sleep_2"): _KV_ASLEEP,
    (_KV_ASLEEP, "sync"): _WEIGHTS,
    (_KV_ASLEEP, "generate"): _AWAKE,
    (_KV_ASLEEP, "wake_weights"): _WEIGHTS,
    (_KV_ASLEEP, "wake_up"): _AWAKE,
    (_DROPPED, "sleep_1"): _DROPPED,
    (_DROPPED, "sleep_2"): _DROPPED,
    (_DROPPED, "sync"): _WEIGHTS,
    (_DROPPED, "generate"): _AWAKE,  # By a sync from the registered actor, or not at all.
    (_DROPPED, "wake_weights"): _WEIGHTS,
    (_DROPPED, "wake_up"): _AWAKE,
}
"""State after each operation. An engine that never sleeps (level None) is AWAKE all its life."""

_HELD: dict[EngineState, tuple[str, ...]] = {
    _AWAKE: ("weights", "kv_cache"),
    _WEIGHTS: ("weights",),
    _KV_ASLEEP: (),
    _DROPPED: (),
}
"""What the engine holds on the device in each state, in the order in which it wakes."""


class ManagedEngine:
    """An engine that cannot generate from weights that are missing, dropped or half updated."""

    def __init__(self, engine: RolloutEngine, sleep_level: int | None) -> None:
        """`engine` is awake, with memory but no weights yet. `sleep_level` None turns sleep off."""
        if sleep_level not in (None, 1, 2):
            raise ValueError(f"sleep_level must be 1, 2 or None: {sleep_level}.")
        self.engine = engine
        self.sleep_level = sleep_level
        self.state = EngineState.AWAKE
        self.weight_version: int | None = None
        """Version of the last finished update; None before the first."""
        self._has_weights = False
        self._sync: Callable[[], object] | None = None

    def register_sync(self, callback: Callable[[], object]) -> None:
        """`callback` brings the actor's current weights, through the three calls of a weight update."""
        self._sync = callback

    def generate(
        self, prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds
    ) -> list[list[GenerationOutput]]:
        """`len(seeds[i])` samples of each prompt i, after waking or syncing what is asleep.

        Raises:
            RuntimeError: There are no weights to generate from, and no actor to get them from.
        """
        if len(prompts) != len(seeds):
            raise ValueError(f"each prompt needs its seeds: {len(prompts)} prompts, {len(seeds)} lists of seeds.")
        self._move("generate")
        return self.engine.generate(prompts, params, seeds)

    def sleep(self) -> None:
        """Frees memory as the sleep level says; does nothing with sleep off."""
        if self.sleep_level is not None:
            self._move("sleep_1" if self.sleep_level == 1 else "sleep_2")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Wakes `weights` only, or everything; dropped weights are synced from the registered actor.

        Raises:
            RuntimeError: The weights were dropped, and no actor is registered.
        """
        self._move("wake_weights" if tags is not None and "kv_cache" not in tags else "wake_up")

    def begin_weight_update(self, specs: Sequence[WeightSpec]) -> None:
        """Wakes the weights, without the KV cache, and checks the names and shapes that will come.

        From here to `finish_weight_update` the engine counts as having no weights.

        Raises:
            ValueError: They are not the engine's.
        """
        self._has_weights = False
        self._move("sync_resident" if self.sleep_level is None else "sync")
        self.engine.check_weights(specs)

    def update_weights(self, bucket: WeightBucket) -> None:
        self.engine.update_weights(bucket)

    def verify_weights(self, bucket: WeightBucket) -> list[str]:
        """Names of the bucket's weights that the engine does not hold bit by bit, before the update is finished."""
        return self.engine.verify_weights(bucket)

    def finish_weight_update(self, version: int) -> None:
        """Makes the update valid under this version.

        Raises:
            RuntimeError: A weight got no update.
        """
        self.engine.finish_weight_update(version)
        self.weight_version = version
        self._has_weights = True

    @property
    def staging_bytes(self) -> int:
        return self.engine.staging_bytes

    def device_bytes(self) -> dict[str, int]:
        return self.engine.device_bytes()

    def _move(self, operation: Operation) -> None:
        """Makes the engine what the table says, and only then notes it."""
        if operation in ("generate", "wake_weights", "wake_up"):
            self._ensure_weights()
        new = TRANSITIONS[self.state, operation]
        held, wanted = _HELD[self.state], _HELD[new]
        if not set(held) <= set(wanted):
            self.engine.sleep()
            held = ()
        for tag in wanted:
            if tag not in held:
                self.engine.wake_up([tag])
        self.state = new

    def _ensure_weights(self) -> None:
        if self._has_weights and self.state is not EngineState.DROPPED:
            return
        if self._sync is None:
            raise RuntimeError(
                f"the engine has no valid weights (state {self.state.value}, last version {self.weight_version}): "
                "synchronise them with update_engine_weights(actor) first, or register an actor."
            )
        self._sync()
        assert self._has_weights and self.state is not EngineState.DROPPED, "the registered sync finished no update"


def check_engine(config: Config, loaded: LoadedConfig) -> None:
    """Raises ValueError or NotImplementedError for what the engine cannot do with this model on this machine."""
    if config.rollout.engine_type == "vllm":
        check_vllm(config, loaded)
    if config.rollout.engine_type == "sglang":
        check_sglang(config, loaded)


def create_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    collectives: Collectives | None,
    tp_group: dist.ProcessGroup | None,
) -> ManagedEngine:
    """Builds the configured engine, without weights. Every rank must call it.

    Engines seed the process that they live in, so its random states are put back afterwards.

    Raises:
        ValueError: No engine has that name.
    """
    name = config.rollout.engine_type
    if name not in _ADAPTERS:
        raise ValueError(f"engine_type must be one of {', '.join(sorted(_ADAPTERS))}: {name!r}. Set --engine_type.")
    with preserved_rng(device):
        return _ADAPTERS[name](config, tokenizer, device, collectives, tp_group)


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Leaves the random states of python, numpy, and torch on the host and on `device` as they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _torch_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    collectives: Collectives | None,
    tp_group: dist.ProcessGroup | None,
) -> ManagedEngine:
    from lightrft.strategy.torch_utils.torch_engine import TorchEngine

    engine = TorchEngine(
        config.model.pretrain,
        tokenizer=tokenizer,
        device=device,
        dtype=torch.bfloat16 if config.model.bf16 else torch.float32,
        mem_util=config.rollout.engine_mem_util,
        collectives=collectives,
        tp_group=tp_group,
    )
    return ManagedEngine(engine, config.rollout.sleep_level)


def _vllm_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    collectives: Collectives | None,
    tp_group: dist.ProcessGroup | None,
) -> ManagedEngine:
    from lightrft.strategy.vllm_utils.vllm_engine import VLLMEngine

    rollout = config.rollout
    engine = VLLMEngine(
        config.model.pretrain,
        device=device,
        dtype=torch.bfloat16 if config.model.bf16 else torch.float32,
        mem_util=rollout.engine_mem_util,
        max_model_len=config.data.prompt_max_len + rollout.generate_max_len,
        sleep_level=rollout.sleep_level,
        tp_size=rollout.engine_tp_size,
        enforce_eager=rollout.enforce_eager,
        takes_stop_strings=bool(rollout.stop),
        timeout_seconds=config.strategy.dist_timeout_seconds + GROUP_TIMEOUT_GRACE_SECONDS,
        collectives=collectives,
    )
    return ManagedEngine(engine, rollout.sleep_level)


def _sglang_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    collectives: Collectives | None,
    tp_group: dist.ProcessGroup | None,
) -> ManagedEngine:
    from lightrft.strategy.sglang_utils.sglang_engine import SGLangEngine

    rollout = config.rollout
    engine = SGLangEngine(
        config.model.pretrain,
        device=device,
        dtype=torch.bfloat16 if config.model.bf16 else torch.float32,
        mem_util=rollout.engine_mem_util,
        max_model_len=config.data.prompt_max_len + rollout.generate_max_len,
        sleep_level=rollout.sleep_level,
        tokenizer=tokenizer if rollout.stop else None,
        enforce_eager=rollout.enforce_eager,
        bucket_bytes=rollout.weight_bucket_bytes,
        timeout_seconds=config.strategy.dist_timeout_seconds + GROUP_TIMEOUT_GRACE_SECONDS,
        collectives=collectives,
        tp_group=tp_group,
    )
    return ManagedEngine(engine, rollout.sleep_level)


_ADAPTERS = {"torch": _torch_engine, "vllm": _vllm_engine, "sglang": _sglang_engine}
"""Each imports its own libraries, when it is called."""
