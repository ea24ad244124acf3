"""build_trainer: from a configuration to a trainer that is ready to fit."""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from lightrft.config import Config, check_config, dump_yaml, usage_errors
from lightrft.datasets.prompts import PromptDataset, load_prompts
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.models.loading import (
    LoadedConfig,
    check_context,
    check_tensor_parallel,
    load_config,
    load_tokenizer,
    stop_token_ids,
)
from lightrft.rewards.functions import RewardFunction, resolve_reward
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.strategy_base import StrategyBase, TrainedRole, check_devices
from lightrft.trainer.fast_exp_maker import FastExperienceMaker, Roles
from lightrft.trainer.phases import PhaseClock
from lightrft.trainer.reward_engine import RewardComputationEngine, reward_input
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer
from lightrft.utils.logging import get_logger, setup_logging
from lightrft.utils.metrics import MetricsWriter, NullWriter, RunWriter
from lightrft.utils.progress import ProgressDisplay
from lightrft.utils.sampler import PromptSampler

logger = get_logger(__name__)


def build_trainer(config: Config) -> SPMDPPOTrainer:
    """Checks the configuration, then loads and shards every role. Every rank must call it.

    A user's mistake ends the process with one message before any model is loaded.
    """
    setup_logging(int(os.environ.get("RANK", "0")))
    disable_progress_bar()
    with usage_errors():
        inputs = check_inputs(config)
    inputs.strategy.setup_distributed()
    return assemble(config, inputs)


@dataclass(frozen=True)
class Inputs:
    """What a run needs, checked; no model is loaded yet."""

    strategy: StrategyBase
    actor: LoadedConfig
    critic: LoadedConfig
    tokenizer: PreTrainedTokenizerBase
    reward_fn: RewardFunction
    prompts: PromptDataset
    eval_prompts: PromptDataset | None
    sampler: PromptSampler
    writer: MetricsWriter


def check_inputs(config: Config) -> Inputs:
    """Raises ValueError, NotImplementedError or OSError for whatever a user can get wrong."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_config(config, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    check_devices()
    strategy = get_strategy(config)
    reward_fn = load_reward(config.reward.reward_fn)
    model, data, rollout = config.model, config.data, config.rollout
    actor = load_config(model.pretrain, model.packing)
    critic = load_config(model.critic_pretrain or model.pretrain, model.packing, "trunk")
    for loaded in (actor, critic):
        check_context(loaded.hf_config, data.prompt_max_len, rollout.generate_max_len)
    check_tensor_parallel(actor.hf_config, rollout.engine_tp_size)
    tokenizer = load_tokenizer(model.pretrain)
    prompts = load_prompts(data.prompt_data, tokenizer, data, data.max_samples)
    eval_prompts = load_prompts(data.eval_data, tokenizer, data, data.max_eval_samples) if data.eval_data else None
    for example in [*prompts, *(eval_prompts or [])]:
        reward_fn.check_columns(reward_input(example, response="", finish_reason="stop"))
    train = config.train
    sampler = PromptSampler(len(prompts), rollout.rollout_batch_size, train.num_episodes, train.seed, data.tail_batch)
    writer = open_writer(train.save_path)
    return Inputs(strategy, actor, critic, tokenizer, reward_fn, prompts, eval_prompts, sampler, writer)


def load_reward(spec: str) -> RewardFunction:
    """The reward function; what the user's own module raises becomes a ValueError that names its line."""
    try:
        return resolve_reward(spec)
    except Exception as error:
        line = _failing_line(error)
        if line is None:
            raise
        what = error.msg if isinstance(error, SyntaxError) else error
        reason = f"{type(error).__name__}: {what} ({line})"
        raise ValueError(f"reward_fn must name a module that loads: {spec}: {reason}. Correct the module.") from error


def _failing_line(error: Exception) -> str | None:
    """File and line of the module whose top level failed, or None where none did."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}, line {frame.lineno}" for frame in frames if frame.name == "<module>"]
    if isinstance(error, SyntaxError):
        lines.append(f"{error.filename}, line {error.lineno}")
    return lines[0] if lines else None


def open_writer(save_path: str) -> MetricsWriter:
    """Rank 0's run folder; the other ranks write nothing."""
    if int(os.environ.get("RANK", "0")) > 0:
        return NullWriter()
    try:
        return RunWriter(save_path, ["model"])
    except OSError as error:
        raise ValueError(f"save_path must be a folder that can be written: {error}. Change --save_path.") from error


def assemble(config: Config, inputs: Inputs) -> SPMDPPOTrainer:
    strategy = inputs.strategy
    torch.manual_seed(config.train.seed)
    num_steps = steps_of_run(config, inputs.sampler)
    inputs.writer.write_config(dump_yaml(config))
    phases = PhaseClock(ProgressDisplay(num_steps, enabled=strategy.is_rank_0))
    actor, critic = trained_roles(config, inputs, num_steps)
    initial_model = None
    if config.algorithm.init_kl_coef > 0:
        initial_model = strategy.prepare_model(inputs.actor, "causal_lm", _actor_builder(config), trainable=False)
    strategy.create_engine(inputs.tokenizer)
    strategy.register_actor(actor.model)
    experience_maker = FastExperienceMaker(
        config,
        strategy,
        Roles(actor.model, initial_model, None if critic is None else critic.model),
        RewardComputationEngine(strategy, inputs.reward_fn),
        inputs.tokenizer,
        stop_token_ids(inputs.tokenizer, inputs.actor),
        inputs.actor.layout,
        phases,
    )
    return SPMDPPOTrainer(
        config,
        strategy,
        actor,
        critic,
        experience_maker,
        inputs.prompts,
        inputs.eval_prompts,
        inputs.sampler,
        inputs.tokenizer,
        num_steps,
        inputs.writer,
        phases,
    )


def steps_of_run(config: Config, sampler: PromptSampler) -> int:
    """`max_steps`, or fewer where the data ends before."""
    wanted = config.train.max_steps or sampler.total_steps
    if wanted > sampler.total_steps:
        logger.warning(
            "max_steps=%d is more than the data has: num_episodes=%d makes %d steps. Set --num_episodes %d for all.",
            wanted,
            config.train.num_episodes,
            sampler.total_steps,
            -(-wanted // sampler.steps_per_episode),
        )
    return min(wanted, sampler.total_steps)


def trained_roles(config: Config, inputs: Inputs, num_steps: int) -> tuple[TrainedRole, TrainedRole | None]:
    """The actor, and the critic where the estimator needs one, with optimizers as long as the run."""
    strategy = inputs.strategy
    updates = num_steps * config.train.max_epochs * updates_per_epoch(config)
    frozen = min(config.algorithm.freezing_actor_steps, num_steps) * config.train.max_epochs * updates_per_epoch(config)
    rates = config.optimizer
    model = strategy.prepare_model(inputs.actor, "causal_lm", _actor_builder(config), trainable=True)
    actor = strategy.prepare_optimizer("actor", model, rates.actor_learning_rate, updates - frozen)
    if config.algorithm.advantage_estimator != "gae":
        return actor, None
    model = strategy.prepare_model(inputs.critic, "trunk", Critic, trainable=True)
    return actor, strategy.prepare_optimizer("critic", model, rates.critic_learning_rate, updates)


def updates_per_epoch(config: Config) -> int:
    """Optimizer steps in one pass over a step's samples; a smaller last batch counts."""
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    return -(-samples // config.train.train_batch_size)


def _actor_builder(config: Config) -> Callable[[PreTrainedModel], Actor]:
    entropy_grad = config.algorithm.entropy_coef != 0
    return lambda model: Actor(model, config.model.chunk_size, entropy_grad)
