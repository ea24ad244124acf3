"""Setup of a run: what a configuration asks for, checked, and the parts that are made of it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config import Config, check_launched, dump_yaml
from lightrft.datasets.media import MediaLoader
from lightrft.datasets.prompts import PromptDataset
from lightrft.models.freezing import check_freeze_prefix
from lightrft.models.loading import (
    LoadedConfig,
    check_context,
    check_same_family,
    check_tensor_parallel,
    check_weight_files,
    empty_model,
    load_config,
    load_tokenizer,
    stop_token_ids,
    with_adapter,
    with_suppressed_ids,
)
from lightrft.models.multimodal import fillers
from lightrft.rewards.pool import GraderPool
from lightrft.rewards.recipes import RewardPlan
from lightrft.rewards.remote import check_reward_servers
from lightrft.strategy.engine import check_engine
from lightrft.strategy.roles import TrainedRole
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.checkpoint_folder import checkpoints
from lightrft.strategy.utils.devices import check_devices
from lightrft.trainer.agreement import check_same_contents, check_same_flags, model_identity
from lightrft.trainer.checkpointing import (
    Checkpointer,
    ResumePoint,
    check_same_models,
    check_same_scale,
    checkpoint_root,
    data_identity,
    find_resume_point,
    saves_checkpoints,
    take_up_data,
)
from lightrft.trainer.data_setup import Rows, evaluation_prompts, make_sampler, pretraining_texts, training_prompts
from lightrft.trainer.evaluation import Evaluation
from lightrft.trainer.fast_exp_maker import FastExperienceMaker
from lightrft.trainer.functions import Estimator, PolicyLossFunction, load_estimator, load_policy_loss
from lightrft.trainer.local_rewards import (
    LoadedRewardModel,
    LocalRewardModels,
    check_conversations,
    load_reward_models,
)
from lightrft.trainer.media_feed import MediaFeed
from lightrft.trainer.media_setup import check_placeholders, media_kinds, media_loader, shared_check
from lightrft.trainer.phases import PhaseClock
from lightrft.trainer.pretraining import PretrainingTexts
from lightrft.trainer.remote_teacher import RemoteTeacher, check_remote_teacher
from lightrft.trainer.reward_engine import RewardComputationEngine
from lightrft.trainer.reward_setup import RewardCallable, check_rows, load_rewards, start_graders
from lightrft.trainer.roles import Roles, frozen_role, reference_model, role_shapes, trained_roles
from lightrft.utils.logging import get_logger
from lightrft.utils.memory_ledger import MemoryLedger
from lightrft.utils.metrics import MetricsWriter, RunWriter, Writers, move_aside
from lightrft.utils.profiling import PROFILE, StepProfiler, check_memory_snapshots
from lightrft.utils.progress import ProgressDisplay
from lightrft.utils.sampler import PromptSampler
from lightrft.utils.wandb_writer import WandbWriter

logger = get_logger(__name__)


@dataclass(frozen=True)
class Inputs:
    """What a run needs, checked; no model is loaded yet."""

    strategy: StrategyBase
    actor: LoadedConfig
    critic: LoadedConfig
    tokenizer: PreTrainedTokenizerBase
    rewards: RewardPlan
    estimator: Estimator
    policy_loss: PolicyLossFunction
    prompts: PromptDataset
    eval_prompts: PromptDataset | None
    sampler: PromptSampler
    data: str
    """Identity of the prompts and their order."""
    resume_point: ResumePoint | None
    writer: MetricsWriter
    teacher: LoadedConfig | None = None
    texts: PretrainingTexts | None = None
    reward_models: Sequence[LoadedRewardModel] = ()
    graders: GraderPool | None = None
    media: MediaLoader | None = None


def check_inputs(
    config: Config,
    reward_fn: RewardCallable | None = None,
    train_data: Rows | None = None,
    eval_data: Rows | None = None,
) -> Inputs:
    """Raises ValueError, NotImplementedError or OSError for whatever a user can get wrong.

    What the caller does not give itself, the flags name.
    """
    given = {"prompt_data": train_data, "eval_data": eval_data}
    rows_of = [name for name, rows in given.items() if rows is not None]
    check_launched(config, rows_of)
    check_devices()
    check_memory_snapshots(config.report)
    strategy = get_strategy(config)
    rewards = load_rewards(config, reward_fn)
    estimator = load_estimator(config.algorithm.advantage_estimator)
    policy_loss = load_policy_loss(config.algorithm.policy_loss)
    model, data, rollout = config.model, config.data, config.rollout
    actor = with_adapter(load_config(model.pretrain, model.packing), config)
    critic = load_config(model.critic_pretrain or model.pretrain, model.packing, "trunk")
    for loaded in (actor, critic):
        check_context(loaded.hf_config, data.prompt_max_len, rollout.generate_max_len)
    check_tensor_parallel(actor.hf_config, rollout.engine_tp_size)
    check_engine(config, actor)
    tokenizer = load_tokenizer(model.pretrain)
    actor = with_suppressed_ids(actor, tokenizer)
    check_freezing(actor, model.freeze_prefix)
    check_same_family(actor, critic)
    teacher = load_teacher(config, actor, tokenizer)
    if model.teacher_url is not None:
        check_remote_teacher(model, min(len(tokenizer), actor.hf_config.get_text_config().vocab_size) - 1)
    check_reward_servers(config)
    reward_models = load_reward_models(config)
    check_same_flags(strategy.process_groups, config)
    texts = pretraining_texts(config, tokenizer, actor)
    media = media_loader(config, actor)
    with shared_check(strategy, media):
        prompts = training_prompts(config, tokenizer, train_data, media)
        eval_prompts = evaluation_prompts(config, tokenizer, eval_data, media)
    check_placeholders([*prompts, *(eval_prompts or [])], actor)
    kinds = media_kinds([*prompts, *(eval_prompts or [])], actor)
    if kinds and model.teacher_url is not None:
        raise ValueError(
            f"teacher_url scores text alone, and prompts have {', '.join(kinds)}. Set --teacher_pretrain in its place."
        )
    check_rows(rewards, {"prompt_data": prompts, "eval_data": eval_prompts or ()})
    check_conversations(reward_models, [*prompts, *(eval_prompts or [])])
    train = config.train
    sampler = make_sampler(prompts, config)
    identity = data_identity(prompts, train.seed, data.tail_batch, data.prompt_data_probs)
    resume_point = find_resume_point(config, log=is_rank_0())
    if resume_point is not None:
        check_same_models(resume_point, role_shapes(config, actor, critic))
        check_same_scale(resume_point, actor.adapter)
        take_up_data(resume_point, sampler, identity, log=is_rank_0())
    models = [one for one in (actor, critic, teacher, *(m.model for m in reward_models)) if one]
    for folder in {one.pretrain for one in models}:
        check_weight_files(folder)
    check_same_contents(
        strategy.process_groups,
        {
            "prompts in the same order": (identity, data_identity(eval_prompts or ())),
            "texts of --pretrain_data in the same order": texts and hash(tuple(map(tuple, texts.texts))),
            "models": [model_identity(one) for one in models],
            "checkpoint to go on from": resume_point and resume_point.state.step,
        },
        "Seed what shuffles the data, and compare the files of the nodes.",
    )
    writer = open_writer(config, resume_point)
    return Inputs(
        strategy,
        actor,
        critic,
        tokenizer,
        rewards,
        estimator,
        policy_loss,
        prompts,
        eval_prompts,
        sampler,
        identity,
        resume_point,
        writer,
        teacher,
        texts,
        reward_models,
        start_graders(config, rewards),
        media,
    )


def check_freezing(actor: LoadedConfig, prefixes: Sequence[str]) -> None:
    """Raises ValueError where --freeze_prefix is not of weights of the actor, or of all."""
    if prefixes:
        check_freeze_prefix(empty_model(actor, "causal_lm", torch.float32), prefixes)


def load_teacher(config: Config, actor: LoadedConfig, tokenizer: PreTrainedTokenizerBase) -> LoadedConfig | None:
    """What --teacher_pretrain says, if anything.

    Raises:
        ValueError: It cannot score the actor's tokens.
    """
    model = config.model
    if model.teacher_pretrain is None:
        return None
    teacher = with_suppressed_ids(load_config(model.teacher_pretrain, model.packing), tokenizer)
    check_same_family(actor, teacher)
    check_context(teacher.hf_config, config.data.prompt_max_len, config.rollout.generate_max_len)
    if load_tokenizer(model.teacher_pretrain).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"the teacher must have the actor's tokenizer: the vocabulary of {model.teacher_pretrain} is not that of "
            f"{model.pretrain}. Choose another --teacher_pretrain."
        )
    if teacher.layout != actor.layout:
        raise ValueError(
            f"teacher and actor must take the same layout: {teacher.layout} and {actor.layout}. Set --packing padded."
        )
    return teacher


def is_rank_0() -> bool:
    """Before the process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


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


def with_reward_name(config: Config, rewards: RewardPlan) -> Config:
    """The configuration that names the reward of the run, also where the caller gave the function itself."""
    name = rewards.reward_fn or config.reward.reward_fn
    return replace(config, reward=replace(config.reward, reward_fn=name))


@dataclass(frozen=True)
class Parts:
    """What a trainer drives: models loaded and sharded, and the engine without weights."""

    strategy: StrategyBase
    actor: TrainedRole
    critic: TrainedRole | None
    experience_maker: FastExperienceMaker
    media: MediaFeed
    prompts: PromptDataset
    evaluation: Evaluation
    sampler: PromptSampler
    checkpointer: Checkpointer
    profiler: StepProfiler
    num_steps: int
    writer: MetricsWriter
    phases: PhaseClock


def assemble(config: Config, inputs: Inputs) -> Parts:
    """Loads and shards every role. Every rank must call it, with a strategy that is set up."""
    strategy = inputs.strategy
    torch.manual_seed(config.train.seed)
    done = 0 if inputs.resume_point is None else inputs.resume_point.state.step
    num_steps = steps_of_run(config, inputs.sampler, done)
    with strategy.collectives.collect("writing the configuration"):
        inputs.writer.write_config(dump_yaml(config))
    ledger = MemoryLedger(strategy.device)
    phases = PhaseClock(ProgressDisplay(num_steps, enabled=strategy.is_rank_0), ledger)
    # Engines look at the memory that is free when they are built: no model is there yet, and theirs leaves at once.
    strategy.create_engine(inputs.tokenizer)
    strategy.sleep_engine()
    actor, critic = trained_roles(config, strategy, inputs.actor, inputs.critic, num_steps)
    initial_model = reference_model(config, strategy, inputs.actor, actor.model)
    teacher = None if inputs.teacher is None else frozen_role(config, strategy, inputs.teacher)
    reward_models = LocalRewardModels(config, strategy, inputs.reward_models, phases.observe)
    strategy.register_actor(actor.model)
    media = MediaFeed(inputs.media, strategy.collectives)
    experience_maker = FastExperienceMaker(
        config,
        strategy,
        Roles(actor.model, initial_model, None if critic is None else critic.model, teacher),
        RewardComputationEngine(
            config, strategy, inputs.rewards, inputs.graders, reward_models if reward_models.names else None
        ),
        inputs.estimator,
        inputs.tokenizer,
        stop_token_ids(inputs.tokenizer, inputs.actor),
        inputs.actor,
        fillers(inputs.actor.hf_config, media_kinds(inputs.prompts, inputs.actor)),
        media,
        phases,
        None if config.model.teacher_url is None else RemoteTeacher(strategy, config.model),
    )
    if strategy.is_rank_0:
        for note in strategy.memory_notes():
            logger.info("%s", note)
    trained = [role for role in (actor, critic) if role is not None]
    models = {"initial_model": initial_model, "teacher": teacher}
    frozen = {name: model for name, model in models.items() if model is not None}
    frozen |= {f"reward {name}": model for name, model in reward_models.models.items()}
    ledger.watch(lambda: strategy.device_bytes(trained, frozen))
    processor = None if inputs.media is None else inputs.media.processor
    checkpointer = Checkpointer(
        config, strategy, trained, inputs.tokenizer, inputs.data, inputs.resume_point, processor
    )
    rollouts = experience_maker.rollouts
    evaluation = Evaluation(config, strategy, rollouts, inputs.eval_prompts, num_steps, inputs.writer, phases)
    profiler = make_profiler(config, strategy, done + 1, num_steps)
    return Parts(
        strategy,
        actor,
        critic,
        experience_maker,
        media,
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
            "max_steps=%d is more than the data has: %s=%d makes %d steps. Set --%s %d for all.",
            wanted,
            sampler.EPISODES,
            sampler.num_episodes,
            most,
            sampler.EPISODES,
            -(-wanted // sampler.steps_per_episode),
        )
    return max(done, min(wanted, most))
