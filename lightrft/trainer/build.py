"""build_trainer: from a configuration to a trainer that is ready to fit."""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from lightrft.config import Config, check_config, dump_yaml, usage_errors
from lightrft.config.sources import source_shares
from lightrft.datasets.prompts import PromptDataset, load_prompts
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.models.loading import (
    LoadedConfig,
    check_context,
    check_tensor_parallel,
    empty_model,
    load_config,
    load_tokenizer,
    stop_token_ids,
)
from lightrft.rewards.functions import RewardFunction, resolve_reward
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.strategy_base import StrategyBase, TrainedRole
from lightrft.strategy.utils.checkpoint_folder import checkpoints
from lightrft.strategy.utils.devices import check_devices
from lightrft.strategy.utils.sharded_state import role_weights
from lightrft.trainer.checkpointing import (
    Checkpointer,
    ResumePoint,
    check_same_models,
    checkpoint_root,
    data_identity,
    find_resume_point,
    saves_checkpoints,
    take_up_data,
)
from lightrft.trainer.evaluation import Evaluation
from lightrft.trainer.fast_exp_maker import FastExperienceMaker, Roles
from lightrft.trainer.phases import PhaseClock
from lightrft.trainer.reward_engine import RewardComputationEngine, reward_input
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer
from lightrft.utils.logging import get_logger, setup_logging
from lightrft.utils.metrics import MetricsWriter, RunWriter, Writers, move_aside
from lightrft.utils.profiling import PROFILE, StepProfiler, check_memory_snapshots
from lightrft.utils.progress import ProgressDisplay
from lightrft.utils.sampler import MixedSampler, PromptSampler
from lightrft.utils.wandb_writer import WandbWriter

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
    data: str
    """Identity of the prompts and their order."""
    resume_point: ResumePoint | None
    writer: MetricsWriter


def check_inputs(config: Config) -> Inputs:
    """Raises ValueError, NotImplementedError or OSError for whatever a user can get wrong."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_config(config, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    check_devices()
    check_memory_snapshots(config.report)
    strategy = get_strategy(config)
    reward_fn = load_reward(config.reward.reward_fn)
    model, data, rollout = config.model, config.data, config.rollout
    actor = load_config(model.pretrain, model.packing)
    critic = load_config(model.critic_pretrain or model.pretrain, model.packing, "trunk")
    for loaded in (actor, critic):
        check_context(loaded.hf_config, data.prompt_max_len, rollout.generate_max_len)
    check_tensor_parallel(actor.hf_config, rollout.engine_tp_size)
    tokenizer = load_tokenizer(model.pretrain)
    prompts = load_prompts(data.prompt_data, data.prompt_split, tokenizer, data, data.max_samples)
    eval_prompts = None
    if data.eval_data:
        eval_prompts = load_prompts(data.eval_data, data.eval_split, tokenizer, data, data.max_eval_samples)
    for example in [*prompts, *(eval_prompts or [])]:
        reward_fn.check_columns(reward_input(example, response="", finish_reason="stop"))
    train = config.train
    sampler = make_sampler(prompts, config)
    identity = data_identity(prompts, train.seed, data.tail_batch, data.prompt_data_probs)
    resume_point = find_resume_point(config, log=is_rank_0())
    if resume_point is not None:
        check_same_models(resume_point, role_shapes(config, actor, critic))
        take_up_data(resume_point, sampler, identity, log=is_rank_0())
    writer = open_writer(config, resume_point)
    return Inputs(
        strategy,
        actor,
        critic,
        tokenizer,
        reward_fn,
        prompts,
        eval_prompts,
        sampler,
        identity,
        resume_point,
        writer,
    )


def is_rank_0() -> bool:
    """Before the process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def role_shapes(config: Config, actor: LoadedConfig, critic: LoadedConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each weight of the trained roles by its name in a checkpoint."""
    with torch.device("meta"):
        models: dict[str, nn.Module] = {"actor": _actor_builder(config)(empty_model(actor, "causal_lm", torch.float32))}
        if config.algorithm.advantage_estimator == "gae":
            models["critic"] = Critic(empty_model(critic, "trunk", torch.float32))
    weights = [role_weights(name, model) for name, model in models.items()]
    return {name: tuple(tensor.shape) for part in weights for name, tensor in part.items()}


def make_sampler(prompts: PromptDataset, config: Config) -> PromptSampler:
    """The order of the prompts; sources with shares are mixed."""
    data, train = config.data, config.train
    settings = (config.rollout.rollout_batch_size, train.num_episodes, train.seed, data.tail_batch)
    if data.prompt_data_probs is None:
        return PromptSampler(len(prompts), *settings)
    shares = source_shares(data.prompt_data_probs, len(prompts.source_sizes))
    return MixedSampler(prompts.source_sizes, shares, *settings)


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


def open_writer(config: Config, resume_point: ResumePoint | None) -> MetricsWriter:
    """Rank 0's run folder; the other ranks write nothing."""
    if not is_rank_0():
        return Writers()
    try:
        if resume_point is None and saves_checkpoints(config):
            # Those of an earlier run would count among the newest ones of this.
            root = checkpoint_root(config)
            move_aside(root, [folder.name for folder in checkpoints(root).values()])
        resumed_step = None if resume_point is None else resume_point.state.step
        writer = RunWriter(config.train.save_path, ["model", PROFILE], resumed_step)
    except OSError as error:
        raise ValueError(f"save_path must be a folder that can be written: {error}. Change --save_path.") from error
    if not config.report.use_wandb:
        return writer
    return Writers(writer, WandbWriter(config.report, config.train.save_path, resumed_step is not None))


def assemble(config: Config, inputs: Inputs) -> SPMDPPOTrainer:
    strategy = inputs.strategy
    torch.manual_seed(config.train.seed)
    done = 0 if inputs.resume_point is None else inputs.resume_point.state.step
    num_steps = steps_of_run(config, inputs.sampler, done)
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
    trained = [role for role in (actor, critic) if role is not None]
    checkpointer = Checkpointer(config, strategy, trained, inputs.tokenizer, inputs.data, inputs.resume_point)
    evaluation = Evaluation(config, strategy, experience_maker, inputs.eval_prompts, num_steps, inputs.writer, phases)
    profiler = make_profiler(config, strategy, done + 1, num_steps)
    return SPMDPPOTrainer(
        config,
        strategy,
        actor,
        critic,
        experience_maker,
        inputs.prompts,
        evaluation,
        inputs.sampler,
        checkpointer,
        profiler,
        num_steps,
        inputs.writer,
        phases,
    )


def make_profiler(config: Config, strategy: StrategyBase, first_step: int, last_step: int) -> StepProfiler:
    folder = Path(config.train.save_path) / PROFILE
    profiler = StepProfiler(config.report, folder, strategy.rank, strategy.device, strategy.collectives.collect)
    if strategy.is_rank_0:
        profiler.warn_of_missed_steps(first_step, last_step)
    return profiler


def steps_of_run(config: Config, sampler: PromptSampler, done: int = 0) -> int:
    """`max_steps`, or fewer where the data ends before; `done` steps are behind the run."""
    most = done + sampler.steps_left
    wanted = config.train.max_steps or most
    if wanted > most:
        logger.warning(
            "max_steps=%d is more than the data has: num_episodes=%d makes %d steps. Set --num_episodes %d for all.",
            wanted,
            config.train.num_episodes,
            most,
            -(-wanted // sampler.steps_per_episode),
        )
    return max(done, min(wanted, most))


def trained_roles(config: Config, inputs: Inputs, num_steps: int) -> tuple[TrainedRole, TrainedRole | None]:
    """The actor, and the critic where the estimator needs one, with optimizers as long as the run."""
    strategy = inputs.strategy
    updates = optimizer_steps(config, num_steps)
    frozen = optimizer_steps(config, min(config.algorithm.freezing_actor_steps, num_steps))
    rates = config.optimizer
    model = strategy.prepare_model(inputs.actor, "causal_lm", _actor_builder(config), trainable=True)
    actor = strategy.prepare_optimizer("actor", model, rates.actor_learning_rate, updates - frozen)
    if config.algorithm.advantage_estimator != "gae":
        return actor, None
    model = strategy.prepare_model(inputs.critic, "trunk", Critic, trainable=True)
    return actor, strategy.prepare_optimizer("critic", model, rates.critic_learning_rate, updates)


def optimizer_steps(config: Config, num_steps: int) -> int:
    """Optimizer steps of a role that learns in so many steps."""
    return num_steps * config.train.max_epochs * updates_per_epoch(config)


def updates_per_epoch(config: Config) -> int:
    """Optimizer steps in one pass over a step's samples; a smaller last batch counts."""
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    return -(-samples // config.train.train_batch_size)


def _actor_builder(config: Config) -> Callable[[PreTrainedModel], Actor]:
    entropy_grad = config.algorithm.entropy_coef != 0
    return lambda model: Actor(model, config.model.chunk_size, entropy_grad)
