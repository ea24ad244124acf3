"""Explanation of a configuration: what a step and the run are made of, in numbers, before anything is loaded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from lightrft.cli.planner import plan_memory
from lightrft.cli.role_sizes import device_bytes, frozen_size, model_sizes, reward_sizes
from lightrft.cli.words import millions, name, on_each_rank, per_rank, ranks, size
from lightrft.config import Config, RewardConfig, check_config
from lightrft.config.checks import range_errors
from lightrft.datasets.prompts import PromptDataset
from lightrft.models.critic import Critic
from lightrft.models.loading import (
    LoadedConfig,
    check_context,
    check_tensor_parallel,
    empty_model,
    load_config,
    load_tokenizer,
    with_adapter,
)
from lightrft.models.lora import adapter_tensors
from lightrft.strategy.roles import stored_dtype
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.utils.optimization import warmup_steps
from lightrft.trainer.data_setup import make_sampler, pretraining_texts, training_prompts
from lightrft.trainer.functions import load_estimator, load_policy_loss
from lightrft.trainer.local_rewards import LoadedRewardModel, load_reward_models
from lightrft.trainer.media_setup import media_loader
from lightrft.trainer.reward_setup import load_rewards
from lightrft.trainer.roles import optimizer_steps, updates_per_epoch
from lightrft.trainer.setup import check_freezing, load_teacher, steps_of_run

ADAM_BYTES = 8
"""Of a parameter: two moments in fp32."""
SHOWN_SHARE = 0.02
"""Of a phase's peak: smaller parts are not named."""
SHOWN_FLAGS = 3

T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """One number and what it is made of."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class Explanation:
    sections: dict[str, list[Line]]
    problems: list[str]
    """What keeps the configuration from running: rule, values, remedy."""


def explain(config: Config, world_size: int) -> Explanation:
    """What `world_size` ranks make of the flags, as far as files and sizes allow; nothing is loaded but the data.

    The sizes of the batches must be right for themselves (`range_errors`).
    """
    problems: list[str] = []
    attempt(lambda: check_config(config, world_size), problems)
    attempt(lambda: get_strategy(config), problems)
    if not problems:
        check_parts(config, problems)
    model = config.model
    actor = attempt(lambda: load_config(model.pretrain, model.packing), problems)
    critic = actor
    if config.algorithm.trains_critic and model.critic_pretrain:
        critic = attempt(lambda: load_config(model.critic_pretrain or "", model.packing, "trunk"), problems)
    if actor is not None:
        attempt(lambda: check_lengths(config, actor), problems)
        attempt(lambda: check_freezing(actor, model.freeze_prefix), problems)
    adapted = None if actor is None else attempt(lambda: with_adapter(actor, config), problems)
    teacher = None
    if model.teacher_pretrain is not None:
        teacher = attempt(lambda: load_config(model.teacher_pretrain or "", model.packing), problems)
    reward_models = attempt(lambda: load_reward_models(config), problems) or []
    sections = {
        f"A step on {ranks(world_size)}": list(step_lines(config, world_size)),
        "The run": list(run_lines(config, problems)),
        "Roles, without activations and the engine's KV cache": list(
            role_lines(config, adapted, critic, reward_models, world_size)
        ),
        "Peak of each phase on a rank's device, estimated": list(
            memory_lines(config, adapted, critic, teacher, reward_models, world_size)
        ),
    }
    return Explanation(sections, list(dict.fromkeys(problems)))


def attempt(function: Callable[[], T], problems: list[str]) -> T | None:
    """The value, or None and the user's mistake among the problems."""
    try:
        return function()
    except (ValueError, NotImplementedError, OSError) as error:
        problems += str(error).splitlines()
        return None


def check_parts(config: Config, problems: list[str]) -> None:
    """Functions, texts and teacher of flags that are right themselves: else they are complained of there."""
    algorithm, model = config.algorithm, config.model
    attempt(lambda: load_rewards(config), problems)
    attempt(lambda: load_estimator(algorithm.advantage_estimator), problems)
    attempt(lambda: load_policy_loss(algorithm.policy_loss), problems)
    if config.data.pretrain_data is not None:
        attempt(
            lambda: pretraining_texts(
                config, load_tokenizer(model.pretrain), load_config(model.pretrain, model.packing)
            ),
            problems,
        )
    if model.teacher_pretrain is not None:
        actor = attempt(lambda: load_config(model.pretrain, model.packing), problems)
        if actor is not None:
            attempt(lambda: load_teacher(config, actor, load_tokenizer(model.pretrain)), problems)


def check_lengths(config: Config, actor: LoadedConfig) -> None:
    check_context(actor.hf_config, config.data.prompt_max_len, config.rollout.generate_max_len)
    check_tensor_parallel(actor.hf_config, config.rollout.engine_tp_size)


# A step


def step_lines(config: Config, world_size: int) -> Iterator[Line]:
    rollout = config.rollout
    num_prompts, num_samples = rollout.rollout_batch_size, rollout.n_samples_per_prompt
    num_responses = num_prompts * num_samples
    estimator = config.algorithm.advantage_estimator
    longest = config.data.prompt_max_len + rollout.generate_max_len
    yield Line("prompts", f"{num_prompts:,}", f"--rollout_batch_size; {on_each_rank(num_prompts, world_size)}")
    tp_size = rollout.engine_tp_size
    if world_size % tp_size == 0:
        groups = f"of {ranks(tp_size)}, which share their prompts (--engine_tp_size)"
        yield Line("rollout groups", f"{world_size // tp_size:,}", groups)
    yield Line("responses", f"{num_responses:,}", f"{num_prompts:,} prompts x --n_samples_per_prompt {num_samples}")
    if config.algorithm.rolls_out_greedily:
        yield Line("greedy responses", f"{num_prompts:,}", f"baselines of --advantage_estimator {estimator}")
    if rollout.dynamic_sampling:
        most = f"{num_prompts * rollout.dynamic_sampling_tries:,}"
        yield Line("prompts at most", most, "until enough have different rewards (--dynamic_sampling_tries)")
    yield Line(
        "tokens at most",
        f"{num_responses * longest:,}",
        f"{num_responses:,} responses x {longest:,} tokens "
        f"(--prompt_max_len {config.data.prompt_max_len} + --generate_max_len {rollout.generate_max_len})",
    )
    yield from update_lines(config, num_responses)
    yield micro_batch_line(config, num_responses, world_size, longest)


def update_lines(config: Config, num_responses: int) -> Iterator[Line]:
    train, algorithm = config.train, config.algorithm
    per_epoch = updates_per_epoch(config)
    size = min(train.train_batch_size, num_responses)
    last = num_responses - (per_epoch - 1) * train.train_batch_size
    rest = "" if last == size else f", the last of {last:,}"
    yield Line(
        "optimizer steps",
        f"{optimizer_steps(config, 1):,}",
        f"--max_epochs {train.max_epochs} x {per_epoch:,} of {size:,} responses (--train_batch_size){rest}",
    )
    if optimizer_steps(config, 1) == 1:
        yield Line("policy ratios", "1", "the one update is of the policy that sampled: on-policy, nothing is clipped")
    else:
        high = algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high
        clip = f"clipped to within {1 - algorithm.eps_clip:g} .. {1 + high:g} (--eps_clip)"
        if algorithm.policy_loss != "ppo_clip":
            clip = f"the rest is for --policy_loss {algorithm.policy_loss} to say"
        yield Line("policy ratios", "1, then not", f"after the first update the policy has moved on: {clip}")


def micro_batch_line(config: Config, num_responses: int, world_size: int, longest: int) -> Line:
    train = config.train
    if train.max_tokens_per_micro_batch is not None:
        limit = f"each of at most {train.max_tokens_per_micro_batch:,} tokens (--max_tokens_per_micro_batch)"
        return Line("micro-batches", "by length", f"{limit}; a longer response is alone")
    per_rank = -(-min(train.train_batch_size, num_responses) // world_size)
    count = -(-per_rank // train.micro_train_batch_size)
    tokens = min(train.micro_train_batch_size, per_rank) * longest
    return Line(
        "micro-batches",
        # Samples are dealt by their tokens, so that ranks have equal work and not equally many.
        f"about {count:,}",
        f"on each rank for an optimizer step: about {per_rank:,} responses by {train.micro_train_batch_size:,} "
        f"(--micro_train_batch_size), at most {tokens:,} tokens in one forward",
    )


# The run


def read_prompts(config: Config) -> PromptDataset:
    """Those to train on, as a run reads them."""
    model = config.model
    media = media_loader(config, load_config(model.pretrain, model.packing))
    try:
        return training_prompts(config, load_tokenizer(model.pretrain), media=media)
    finally:
        if media is not None:
            media.close()


def run_lines(config: Config, problems: list[str]) -> Iterator[Line]:
    """Steps of the run, where its data can be read."""
    train, algorithm = config.train, config.algorithm
    prompts = None
    if config.data.prompt_data is not None:
        prompts = attempt(lambda: read_prompts(config), problems)
    sampler = None if prompts is None else attempt(lambda: make_sampler(prompts, config), problems)
    if prompts is None or sampler is None:
        yield Line("steps", "unknown", "the data cannot be used: see below")
        return
    num_steps = steps_of_run(config, sampler)
    longest = f"longer than --prompt_max_len {config.data.prompt_max_len}"
    overlong = f"{prompts.num_filtered:,} more are left out and {prompts.num_truncated:,} cut: {longest}"
    fits = not prompts.num_filtered and not prompts.num_truncated
    yield Line("prompts", f"{len(prompts):,}", f"none is {longest}" if fits else overlong)
    yield Line("steps in an episode", f"{sampler.steps_per_episode:,}", f"--tail_batch {config.data.tail_batch}")
    every = f"{sampler.steps_per_episode:,} x --num_episodes {train.num_episodes} = {sampler.total_steps:,}"
    stop = "" if train.max_steps is None else f", --max_steps {train.max_steps:,}"
    yield Line("steps", f"{num_steps:,}", every + stop)
    frozen = min(algorithm.freezing_actor_steps, num_steps)
    updates = optimizer_steps(config, num_steps - frozen)
    yield Line("optimizer steps", f"{updates:,}", f"of the actor{frozen_part(frozen)}")
    yield warmup_line(config, "actor", updates, config.optimizer.actor_learning_rate)
    if algorithm.trains_critic:
        yield warmup_line(config, "critic", optimizer_steps(config, num_steps), config.optimizer.critic_learning_rate)


def frozen_part(frozen: int) -> str:
    return f"; it rests in the first {frozen:,} steps (--freezing_actor_steps)" if frozen else ""


def warmup_line(config: Config, role: str, updates: int, peak: float) -> Line:
    options = config.optimizer
    source = (
        "--lr_warmup_steps" if options.lr_warmup_steps is not None else f"--lr_warmup_ratio {options.lr_warmup_ratio}"
    )
    decay = "stays" if options.lr_scheduler == "constant" else f"falls ({options.lr_scheduler})"
    count = warmup_steps(options, updates)
    return Line(
        f"{role} warm-up", f"{count:,}", f"of {updates:,} optimizer steps ({source}), to {peak:g}, where it {decay}"
    )


# Roles


def role_lines(
    config: Config,
    actor: LoadedConfig | None,
    critic: LoadedConfig | None,
    reward_models: Sequence[LoadedRewardModel],
    world_size: int,
) -> Iterator[Line]:
    """The roles that are loaded and why, and what each rank holds of them."""
    algorithm, rollout = config.algorithm, config.rollout
    trained, frozen = stored_dtype(config, trainable=True), stored_dtype(config, trainable=False)
    count = None if actor is None else num_parameters(empty_model(replace(actor, adapter=None), "causal_lm", trained))
    yield from actor_lines(config, actor, count, world_size)
    if algorithm.init_kl_coef > 0 and config.model.trains_adapter:
        start = "without its adapter" if config.model.lora_path is None else "with the adapter that it started from"
        yield Line("initial_model", "0", f"the actor {start} (--init_kl_coef {algorithm.init_kl_coef:g})")
    elif algorithm.init_kl_coef > 0:
        held = per_rank(count, frozen.itemsize, world_size)
        why = f"the KL divergence is taken from it (--init_kl_coef {algorithm.init_kl_coef:g})"
        yield Line("initial_model", millions(count), f"frozen: {why}; {held} in {name(frozen)}")
    else:
        yield Line("initial_model", "none", "--init_kl_coef 0 needs no reference")
    if config.model.teacher_pretrain is not None:
        yield Line("teacher", config.model.teacher_pretrain, f"frozen: its log-probs weigh {algorithm.opd_kl_coef:g}")
    elif config.model.teacher_url is not None:
        yield Line("teacher", "behind a server", f"{config.model.teacher_url} ({config.model.teacher_api})")
    if algorithm.trains_critic:
        yield trained_line("critic", None if critic is None else critic_parameters(critic, trained), config, world_size)
    else:
        yield Line("critic", "none", f"--advantage_estimator {algorithm.advantage_estimator} needs none")
    yield from reward_model_lines(config, reward_models, world_size)
    yield from reward_server_lines(config.reward)
    sleep = "sleeps between rollouts" if rollout.enable_engine_sleep else "never sleeps (--disable_engine_sleep)"
    held = per_rank(count, frozen.itemsize, 1)
    yield Line("engine", rollout.engine_type, f"{held} in {name(frozen)} while awake; {sleep}")
    if actor is not None:
        yield Line("layout", actor.layout, f"--packing {config.model.packing}, attention {actor.attention}")


def reward_server_lines(options: RewardConfig) -> Iterator[Line]:
    if options.remote_rm_url is not None:
        rows = f"{options.remote_rm_batch_size:,} responses a request (--remote_rm_batch_size)"
        yield Line("reward remote_rm", "behind a server", f"{options.remote_rm_url}: {rows}")
    if options.judge_url is not None:
        yield Line("reward judge", "behind a server", f"{options.judge_model} at {options.judge_url}")


def reward_model_lines(config: Config, reward_models: Sequence[LoadedRewardModel], world_size: int) -> Iterator[Line]:
    dtype = stored_dtype(config, trainable=False)
    place = "all at once" if config.reward.reward_residency == "all" else "one at a time"
    for loaded in reward_models:
        count = num_parameters(empty_model(loaded.model, "classifier", dtype))
        held = f"{per_rank(count, dtype.itemsize, world_size)} in {name(dtype)}"
        on_device = f"on the device while they score, {place} (--reward_residency)"
        yield Line(f"reward {loaded.name}", millions(count), f"frozen: it scores responses; {held}, {on_device}")


def actor_lines(config: Config, actor: LoadedConfig | None, count: int | None, world_size: int) -> Iterator[Line]:
    if not config.model.trains_adapter:
        yield trained_line("actor", count, config, world_size)
        return
    learned = None
    if actor is not None:
        model = empty_model(actor, "causal_lm", torch.float32)
        learned = sum(tensor.numel() for _, tensor in adapter_tensors(model))
    frozen = stored_dtype(config, trainable=False)
    held = per_rank(count, frozen.itemsize, world_size)
    yield Line("actor", millions(count), f"frozen beside its adapter; {held} in {name(frozen)}")
    yield trained_line("adapter", learned, config, world_size)


def trained_line(role: str, count: int | None, config: Config, world_size: int) -> Line:
    dtype = stored_dtype(config, trainable=True)
    strategy = config.strategy
    held = per_rank(count, 2 * dtype.itemsize + ADAM_BYTES, world_size)
    computes = ", computes in bfloat16" if config.model.bf16 else ""
    place = ""
    if strategy.fsdp_cpu_offload:
        place = ", on the host (--fsdp_cpu_offload)"
    elif strategy.critic_cpu_offload and role == "critic":
        place = ", on the host (--critic_cpu_offload)"
    elif strategy.adam_offload:
        adam = per_rank(count, ADAM_BYTES, world_size)
        place = f", of which Adam's {adam} wait on the host (--adam_offload)"
    return Line(role, millions(count), f"learns: weights, gradients and Adam in {name(dtype)}{computes}: {held}{place}")


def critic_parameters(loaded: LoadedConfig, dtype: torch.dtype) -> int:
    trunk = empty_model(loaded, "trunk", dtype)
    with torch.device("meta"):
        return num_parameters(Critic(trunk))


def num_parameters(model: nn.Module) -> int:
    """A tied weight counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


# Memory


def memory_lines(
    config: Config,
    actor: LoadedConfig | None,
    critic: LoadedConfig | None,
    teacher: LoadedConfig | None,
    reward_models: Sequence[LoadedRewardModel],
    world_size: int,
) -> Iterator[Line]:
    """What each phase holds at its peak, the largest part first, and the flags that would lower it much."""
    if actor is None or critic is None or any(range_errors(config)):
        return
    of_teacher = None if teacher is None else frozen_size(teacher)
    sizes = model_sizes(config, actor, critic)
    of_rewards = reward_sizes(reward_models)
    for peak in plan_memory(config, *sizes, world_size, device_bytes(), of_teacher, of_rewards):
        parts = sorted(peak.owners.items(), key=lambda item: -item[1])
        text = ", ".join(f"{owner} {size(held)}" for owner, held in parts if held >= SHOWN_SHARE * peak.total)
        lower = ", ".join(f"{flag} (-{size(saved)})" for flag, saved in list(peak.savings.items())[:SHOWN_FLAGS])
        yield Line(peak.phase, size(peak.total), text + (f"; less with {lower}" if lower else ""))
