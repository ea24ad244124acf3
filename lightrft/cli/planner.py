"""The planner: what a rank's device holds at the peak of each phase of a step, by owner, from sizes alone.

Each sum is over tensors that the code is known to make, for the longest samples; docs/memory.md derives them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from lightrft.cli.model_size import FP32, ModelSize
from lightrft.config import Config
from lightrft.strategy.deepspeed.settings import REDUCE_BUCKET, has_bf16_optimizer, zero_stage
from lightrft.strategy.roles import stored_dtype
from lightrft.strategy.sglang_utils.channel import staging_size

Bytes: TypeAlias = dict[str, int]
"""Bytes by owner."""

CONTEXT_BYTES = 600 * 2**20
"""CUDA's context and kernels, and workspaces of its libraries."""
LOGIT_COPIES = 8
"""Bytes for each logit of a chunk: in fp32 the logit and its log-prob, or log-prob and probability."""
GATHERED_LAYERS = 3
"""Layers of gathered weights that FSDP2 has at a time: one computes, one is on its way, one is being copied out."""
ZERO3_LIVE_PARAMETERS = 10**9
ZERO_SUB_GROUP = 10**9
"""DeepSpeed's stage3_max_live_parameters and sub_group_size, in parameters."""
WORTH_NAMING = 0.05
"""A flag is named where it takes this share of the peak away."""


@dataclass(frozen=True)
class PhasePeak:
    """What a phase holds at its peak."""

    phase: str
    owners: Bytes
    savings: Bytes
    """What a flag that is not set would take off this peak, for those that take much."""

    @property
    def total(self) -> int:
        return sum(self.owners.values())


def plan_memory(
    config: Config,
    actor: ModelSize,
    critic: ModelSize | None,
    world_size: int,
    device_bytes: int | None = None,
    teacher: ModelSize | None = None,
    reward_models: Mapping[str, ModelSize] | None = None,
) -> list[PhasePeak]:
    """Each phase's peak on one rank, and which flags would lower it.

    Args:
        config: All flags.
        actor: Also the size of the reference and of the engine.
        critic: None where the run has none.
        world_size: Ranks of the run.
        device_bytes: Memory of a rank's device; None plans the torch engine's cache as if all responses fitted.
        teacher: None where the run has none.
        reward_models: Those that score here, by name.
    """
    models = reward_models or {}

    def peaks(changed: Config) -> dict[str, Bytes]:
        return Plan(changed, actor, critic, world_size, device_bytes, teacher, models).phases()

    now = peaks(config)
    alternatives = _alternatives(config, critic is not None, len(models) > 1)
    others = {flag: peaks(changed) for flag, changed in alternatives.items()}
    plan = []
    for phase, owners in now.items():
        total = sum(owners.values())
        saved = {flag: total - sum(other[phase].values()) for flag, other in others.items()}
        much = {flag: size for flag, size in saved.items() if size >= WORTH_NAMING * total}
        plan.append(PhasePeak(phase, owners, dict(sorted(much.items(), key=lambda item: -item[1]))))
    return plan


class Plan:
    """The arithmetic for one configuration."""

    def __init__(
        self,
        config: Config,
        actor: ModelSize,
        critic: ModelSize | None,
        world_size: int,
        device_bytes: int | None,
        teacher: ModelSize | None,
        reward_models: Mapping[str, ModelSize],
    ) -> None:
        self.config = config
        self.actor = actor
        self.critic = critic
        self.teacher = teacher
        self.reward_models = reward_models
        self.world_size = world_size
        self.device_bytes = device_bytes
        self.itemsize = stored_dtype(config, trainable=False).itemsize
        self.stage = None if config.strategy.fsdp else zero_stage(config)
        self.moves_trained = config.strategy.fsdp or not has_bf16_optimizer(config)
        train, rollout = config.train, config.rollout
        self.longest = config.data.prompt_max_len + rollout.generate_max_len
        self.num_responses = rollout.rollout_batch_size * rollout.n_samples_per_prompt
        batch = -(-min(train.train_batch_size, self.num_responses) // world_size)
        rows = min(train.micro_train_batch_size, batch)
        if train.max_tokens_per_micro_batch is not None:
            rows = min(max(1, train.max_tokens_per_micro_batch // self.longest), batch)
        self.num_micro_batches = -(-batch // rows)
        self.tokens = rows * self.longest
        self.response_tokens = rows * rollout.generate_max_len

    def phases(self) -> dict[str, Bytes]:
        """Bytes by owner of each phase; one that the run does not have is left out."""
        held = self._resident()
        actor_away = {"actor weights": 0} if self.config.strategy.offload_actor and self.moves_trained else {}
        phases = {
            "generate": self._rollout(held | actor_away),
            "actor": held | self._scoring(self.actor, self._is_on_host("actor")),
        }
        if frozen := self._frozen_scoring():
            phases["reference"] = _fullest(held | moment for moment in frozen)
        if self.critic is not None:
            with_critic = held | {"critic weights": self._weights("critic", self.critic)}
            phases["critic"] = with_critic | self._scoring(self.critic, self._is_on_host("critic"))
        if rewarding := self._rewarding():
            phases["reward"] = _fullest(held | moment for moment in rewarding)
        phases["train"] = self._training()
        phases["sync"] = held | self._engine_weights() | {"sync buckets": self._sync_buckets() + self._staging()}
        return {phase: {k: v for k, v in owners.items() if v} for phase, owners in phases.items()}

    # What stays

    def _resident(self) -> Bytes:
        """On the device between phases."""
        strategy = self.config.strategy
        held = {"other": CONTEXT_BYTES}
        for name, model in self._roles().items():
            leaves = name == "critic" and strategy.offload_critic and self.moves_trained
            held[f"{name} weights"] = 0 if leaves else self._weights(name, model)
            held[f"{name} optimizer"] = 0 if strategy.adam_offload else self._optimizer(name, model)
            # DeepSpeed keeps memory for them.
            if self.stage == 3 or not self.moves_trained:
                held[f"{name} gradients"] = self._gradients(name, model)
        if self.stage == 3:
            held["reduction buckets"] = len(self._roles()) * REDUCE_BUCKET * FP32
        if self.config.rollout.keeps_engine_weights:
            held |= self._engine_weights()
        return held

    def _roles(self) -> dict[str, ModelSize]:
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    def _is_on_host(self, name: str) -> bool:
        strategy = self.config.strategy
        return strategy.fsdp_cpu_offload or (name == "critic" and strategy.critic_cpu_offload)

    def _weights(self, name: str, model: ModelSize) -> int:
        if self._is_on_host(name):
            return 0
        frozen = model.total - model.learned if model.learned < model.total else 0
        if self.stage is None:
            return self._shard(frozen * self.itemsize + model.learned * FP32)
        return self._shard(model.total * self.itemsize) if self.stage == 3 else model.total * self.itemsize

    def _optimizer(self, name: str, model: ModelSize) -> int:
        """Adam's moments, and DeepSpeed's fp32 masters, which FSDP2 has as its weights."""
        if self._steps_on_host(name):
            return 0
        return self._shard(model.learned * FP32 * (2 if self.stage is None else 3))

    def _steps_on_host(self, name: str) -> bool:
        """Whether the host takes the optimizer's steps: DeepSpeed's offload leaves its state there for good."""
        return self._is_on_host(name) or (self.stage is not None and self.config.strategy.adam_offload)

    def _gradients(self, name: str, model: ModelSize) -> int:
        if self._steps_on_host(name):
            return 0
        return model.learned * FP32 if self.stage == 1 else self._shard(model.learned * FP32)

    def _frozen_scoring(self) -> list[Bytes]:
        """Reference and teacher, one after the other; an adapter's reference is the actor."""
        moments = []
        if self.config.algorithm.init_kl_coef > 0:
            own = {} if self.config.model.trains_adapter else {"initial_model weights": self._frozen_bytes(self.actor)}
            moments.append(own | self._scoring(self.actor, self.stage == 3))
        if self.teacher is not None:
            own = {"teacher weights": self._frozen_bytes(self.teacher)}
            moments.append(own | self._scoring(self.teacher, self.stage == 3))
        return moments

    def _rewarding(self) -> list[Bytes]:
        """Each reward model's turn: those after it are there too, unless they come one at a time."""
        moments = []
        at_once = self.config.reward.reward_residency == "all"
        for position, model in enumerate(self.reward_models.values()):
            present = list(self.reward_models.items())[position : None if at_once else position + 1]
            own = {f"reward {name} weights": self._frozen_bytes(other) for name, other in present}
            moments.append(own | self._scoring(model, self.stage == 3))
        return moments

    def _frozen_bytes(self, model: ModelSize) -> int:
        """A frozen role's weights on the device while it scores: ZeRO-3 brings them layer by layer instead."""
        whole = model.total * self.itemsize
        return {None: self._shard(whole), 3: 0}.get(self.stage, whole)

    def _engine_weights(self) -> Bytes:
        whole = self.actor.total * self.itemsize
        split = 1 if self.config.rollout.engine_type == "torch" else self.config.rollout.engine_tp_size
        return {"engine weights": whole // split}

    def _shard(self, num_bytes: int) -> int:
        return -(-num_bytes // self.world_size)

    # Phases

    def _rollout(self, held: Bytes) -> Bytes:
        """Dynamic sampling asks reward models while the engine is awake."""
        generation = held | self._generation(held)
        if not self.config.rollout.dynamic_sampling:
            return generation
        # What the torch engine has beside its weights is gone between two batches.
        awake = self._engine_weights() if self.config.rollout.engine_type == "torch" else self._generation(held)
        return _fullest([generation, *(held | awake | moment for moment in self._rewarding())])

    def _generation(self, held: Mapping[str, int]) -> Bytes:
        """The torch engine's responses come in chunks that its share of the free memory has room for."""
        rollout = self.config.rollout
        engine = self._engine_weights()
        if rollout.engine_type != "torch" and self.device_bytes is not None:
            # Its share of the whole device, which was free; what weights leave is the cache's, whatever responses are.
            share = int(rollout.engine_mem_util * self.device_bytes)
            return engine | {"engine kv_cache": max(0, share - sum(engine.values()))}
        row = self.longest * self.actor.cache_per_token(self.itemsize)
        logits = 2 * FP32 * self.actor.vocabulary
        rows = -(-self.num_responses // self.world_size)
        if self.device_bytes is not None:
            free = max(0, self.device_bytes - sum(held.values()) - sum(engine.values()))
            most = int(rollout.engine_mem_util * free) // (row + logits)
            rows = min(rows, max(rollout.n_samples_per_prompt, most))
        prompts = -(-rows // rollout.n_samples_per_prompt) * self.config.data.prompt_max_len
        reads = {
            "engine kv_cache": prompts * self.actor.cache_per_token(self.itemsize),
            "activations": prompts * self.actor.scratch_per_token(self.itemsize),
        }
        writes = {"engine kv_cache": rows * row, "logits": rows * logits}
        return engine | _fullest([reads, writes])

    def _scoring(self, model: ModelSize, from_host: bool) -> Bytes:
        """A forward without gradients."""
        return {
            "activations": self.tokens * model.scratch_per_token(self.itemsize),
            "logits": self._logits(model),
            "gathered weights": self._gathered(model, from_host),
        }

    def _training(self) -> Bytes:
        """The fullest moment: in a backward pass of either role, or in the step of its optimizer."""
        held = self._resident()
        for name, model in self._roles().items():
            held[f"{name} weights"] = self._weights(name, model)
            held[f"{name} optimizer"] = self._optimizer(name, model)
        gradients = {f"{name} gradients": self._gradients(name, model) for name, model in self._roles().items()}
        moments = [held | gradients | {"optimizer step": self._step_scratch(n, m)} for n, m in self._roles().items()]
        for name, model in self._roles().items():
            # In an only micro-batch a role's gradients appear as its activations go; the critic comes after the actor.
            earlier = {"actor gradients": gradients["actor gradients"]} if name == "critic" else {}
            present = gradients if self.num_micro_batches > 1 else earlier
            moments += [held | present | moment for moment in self._backward(name, model)]
        return _fullest(moments)

    def _backward(self, name: str, model: ModelSize) -> list[Bytes]:
        """Its start, at the logits; the first layer on the way back; its end, where the embedding is reduced."""
        itemsize = self.itemsize
        per_layer = model.saved_per_token(itemsize)
        checkpoints = self.config.model.gradient_checkpointing
        saved = self.tokens * model.layers * (itemsize * model.hidden if checkpoints else per_layer)
        saved += (FP32 + 2 * itemsize) * model.hidden * self.tokens + itemsize * model.hidden * self.response_tokens
        scratch = self.tokens * (model.scratch_per_token(itemsize) + (per_layer if checkpoints else 0))
        gathered = self._gathered(model, self._is_on_host(name))
        # Gradients of what is outside of the layers: of the LM head from the start on, or of the embedding at the end.
        trains_root = model.learned == model.total
        head = itemsize * model.vocabulary * model.hidden * trains_root
        root = itemsize * model.root * trains_root
        # The LM head adds up the gradient of its input in fp32.
        of_hidden = (FP32 + itemsize) * model.hidden * self.response_tokens if model.vocabulary else 0
        return [
            {
                "activations": saved + of_hidden,
                "logits": self._logits(model),
                "gathered weights": gathered,
                "reductions": head,
            },
            {
                "activations": saved + scratch,
                "gathered weights": gathered,
                "reductions": head + self._reduction(model.layer, itemsize),
            },
            {
                "gathered weights": gathered,
                "reductions": root + self._reduction(model.root * trains_root, 0),
                f"{name} gradients": self._gradients(name, model),
            },
        ]

    def _reduction(self, parameters: int, itemsize: int) -> int:
        """Whole gradients on their way to the shards: in the dtype of the backward pass, and in fp32.

        DeepSpeed's buckets have one size for all models; what is larger is reduced alone.
        """
        if self.stage is None:
            return parameters * (itemsize + FP32) + self._shard(parameters * FP32)
        bucket = 0 if self.stage == 3 else REDUCE_BUCKET * self.itemsize
        return bucket + min(max(REDUCE_BUCKET, self.actor.root), self.actor.total) * FP32

    def _step_scratch(self, name: str, model: ModelSize) -> int:
        """Adam takes the roots of all second moments at a time; DeepSpeed copies the gradients of a sub-group too."""
        if self._steps_on_host(name):
            return 0
        if self.stage is None:
            return self._shard(model.learned * FP32)
        shard = self._shard(model.learned)
        return 2 * FP32 * (min(shard, ZERO_SUB_GROUP) if self.stage == 3 else shard)

    def _logits(self, model: ModelSize) -> int:
        return min(self.config.model.chunk_size, self.response_tokens) * model.vocabulary * LOGIT_COPIES

    def _gathered(self, model: ModelSize, from_host: bool) -> int:
        """Weights made whole for a forward or backward pass."""
        if self.stage is None:
            arriving = self._shard(model.root * FP32) if from_host else 0
            return self.itemsize * (model.root + GATHERED_LAYERS * model.layer) + arriving
        if self.stage == 3:
            return self.itemsize * min(model.total, ZERO3_LIVE_PARAMETERS + model.root)
        return 0

    def _sync_buckets(self) -> int:
        """A bucket is gathered in half its size, and put in order in the other; a larger weight is alone."""
        half = self.config.rollout.weight_bucket_bytes // 2
        largest = self.actor.largest * self.itemsize
        if largest > half:
            return largest
        return min(half, self.actor.total * self.itemsize) * (2 if self.world_size > 1 else 1)

    def _staging(self) -> int:
        """SGLang's buffer of weights on their way, which holds the largest."""
        if self.config.rollout.engine_type != "sglang":
            return 0
        return staging_size(self.actor.largest * self.itemsize, self.config.rollout.weight_bucket_bytes)


def _fullest(moments: Iterable[Bytes]) -> Bytes:
    return max(moments, key=lambda owners: sum(owners.values()))


def _alternatives(config: Config, has_critic: bool, has_reward_models: bool) -> dict[str, Config]:
    """The configuration with each further flag that saves memory, where the flags allow it."""
    strategy, train = config.strategy, config.train
    on_host = strategy.fsdp_cpu_offload
    critic_stays = has_critic and not (strategy.critic_cpu_offload or strategy.offload_critic or on_host)
    moves = strategy.adam_offload or strategy.offload_actor or strategy.offload_critic or strategy.critic_cpu_offload
    found: dict[str, Config] = {}

    def offer(flag: str, applies: bool, change: Callable[[], Config]) -> None:
        if applies:
            found[flag] = change()

    def on_strategy(**changes: bool) -> Callable[[], Config]:
        return lambda: replace(config, strategy=replace(strategy, **changes))

    def on_model(**changes: bool) -> Callable[[], Config]:
        return lambda: replace(config, model=replace(config.model, **changes))

    offer("--gradient_checkpointing", not config.model.gradient_checkpointing, on_model(gradient_checkpointing=True))
    offer("--bf16", not config.model.bf16, on_model(bf16=True))
    offer("--adam_offload", not (strategy.adam_offload or on_host), on_strategy(adam_offload=True))
    offer("--offload_actor", not (strategy.offload_actor or on_host), on_strategy(offload_actor=True))
    offer("--offload_critic", critic_stays, on_strategy(offload_critic=True))
    offer("--critic_cpu_offload", critic_stays and strategy.fsdp, on_strategy(critic_cpu_offload=True))
    offer("--fsdp_cpu_offload", strategy.fsdp and not (on_host or moves), on_strategy(fsdp_cpu_offload=True))
    offer(
        "--reward_residency one",
        has_reward_models and config.reward.reward_residency == "all",
        lambda: replace(config, reward=replace(config.reward, reward_residency="one")),
    )
    half = train.micro_train_batch_size // 2
    offer(
        f"--micro_train_batch_size {half}",
        train.max_tokens_per_micro_batch is None and half >= 1,
        lambda: replace(config, train=replace(train, micro_train_batch_size=half)),
    )
    return found
