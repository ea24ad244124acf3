"""Flags of a reward model's training, as frozen dataclasses by owner, and the checks across them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lightrft.config.arguments import (
    AdamConfig,
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Packing,
    ReportConfig,
    StrategyConfig,
    TrainConfig,
)
from lightrft.config.checks import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    RANGES,
    checkpoint_errors,
    file_errors,
    range_errors,
    report_errors,
    source_errors,
    strategy_errors,
)
from lightrft.config.cli import parse_flags
from lightrft.config.kinds import kind_errors

DESCRIPTION = "LightRFT trains a reward model from pairs of a better and a worse answer."
DEFAULT_MARGIN_KEY = "margin"
OFF_OR_AT_LEAST_1 = RANGES["eval_steps"]
PAIR_RANGES = RANGES | {
    "learning_rate": ABOVE_0,
    "num_epochs": AT_LEAST_1,
    "max_len": AT_LEAST_1,
    "max_samples": AT_LEAST_1,
    "max_eval_samples": AT_LEAST_1,
    "eval_steps": OFF_OR_AT_LEAST_1,
    "seed": AT_LEAST_0,
}


@dataclass(frozen=True)
class ClassifierConfig:
    pretrain: str
    """Folder (or hub id) that the reward model starts from: a causal language model, whose trunk gets a new head, or a
    reward model."""
    bf16: bool = False
    """Compute in bf16 over fp32 master weights and fp32 Adam moments, and write the model in bf16."""
    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass instead of keeping its activations."""
    packing: Packing = "auto"
    """Layout of a micro-batch: one row without padding, right-padded rows, or packed where ragged attention runs."""


@dataclass(frozen=True)
class PairDataConfig:
    train_data: str
    """Pairs: a .jsonl, .json, .csv or .parquet file, a folder or a hub id; several are separated by commas."""
    train_split: str = "train"
    """Split of --train_data, where it is a folder or a hub id."""
    eval_data: str | None = None
    """Pairs that are held out, written as --train_data is."""
    eval_split: str = "test"
    """Split of --eval_data, where it is a folder or a hub id."""
    prompt_key: str = "prompt"
    """Column of the prompt: a text, or with --apply_chat_template a list of messages as well."""
    chosen_key: str = "chosen"
    """Column of the better answer, a text."""
    rejected_key: str = "rejected"
    """Column of the worse answer, a text."""
    margin_key: str = DEFAULT_MARGIN_KEY
    """Column of the difference that the two scores are to exceed; 0 where a row has none."""
    apply_chat_template: bool = False
    """Write prompt and answer with the tokenizer's chat template; a text becomes one message of the user."""
    system_prompt: str | None = None
    """System message in front of every prompt, in the place of the row's own. Read by --apply_chat_template."""
    max_len: int = 1024
    """Tokens of prompt and answer at most; a pair with more in either answer is left out."""
    max_samples: int | None = None
    """Use only this many rows of each source of --train_data."""
    max_eval_samples: int = 500
    """Use only this many rows of each source of --eval_data."""


@dataclass(frozen=True)
class PairOptimizerConfig(AdamConfig):
    learning_rate: float = 9e-6
    """Peak learning rate."""


@dataclass(frozen=True)
class PairTrainConfig:
    train_batch_size: int = 128
    """Pairs per optimizer step, over all ranks."""
    micro_train_batch_size: int = 4
    """Pairs per forward on one rank."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens per forward on one rank; where set, it rules instead of --micro_train_batch_size."""
    num_epochs: int = 1
    """Passes over the pairs; those of a pass that do not fill a batch are left out."""
    max_steps: int | None = None
    """Stop after this many optimizer steps."""
    eval_steps: int = -1
    """Evaluate on --eval_data after every so many steps too; -1 evaluates at the start and at the end alone."""
    seed: int = 42
    """Seed of the order of the pairs."""
    save_path: str = "./ckpt"
    """Run folder: configuration, metrics, summary, TensorBoard files and the final model."""


@dataclass(frozen=True)
class RewardModelConfig:
    model: ClassifierConfig
    data: PairDataConfig
    optimizer: PairOptimizerConfig = field(default_factory=PairOptimizerConfig)
    train: PairTrainConfig = field(default_factory=PairTrainConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    report: ReportConfig = field(default_factory=ReportConfig)


def parse_reward_model_config(argv: Sequence[str] | None = None, prog: str | None = None) -> RewardModelConfig:
    """`parse_config` of a reward model's training."""
    return parse_flags(RewardModelConfig, DESCRIPTION, argv, prog)


def run_config(config: RewardModelConfig) -> Config:
    """The flags that strategies and checkpoints read, under the names that they have in reinforcement learning."""
    model, train, optimizer = config.model, config.train, vars(config.optimizer).copy()
    return Config(
        model=ModelConfig(**vars(model)),
        data=DataConfig(),
        algorithm=AlgorithmConfig(advantage_estimator="group_norm", init_kl_coef=0.0),
        optimizer=OptimizerConfig(actor_learning_rate=optimizer.pop("learning_rate"), **optimizer),
        train=TrainConfig(
            train_batch_size=train.train_batch_size,
            micro_train_batch_size=train.micro_train_batch_size,
            max_tokens_per_micro_batch=train.max_tokens_per_micro_batch,
            num_episodes=train.num_epochs,
            max_steps=train.max_steps,
            seed=train.seed,
            save_path=train.save_path,
        ),
        strategy=config.strategy,
        checkpoint=config.checkpoint,
        report=config.report,
    )


def check_reward_model_config(config: RewardModelConfig) -> None:
    """Refuses settings that cannot work, before models, data or process groups exist.

    Raises:
        ValueError: some rule is broken; one line for each, `rule: values. remedy.`
    """
    # What is of a wrong kind cannot be compared.
    if errors := list(kind_errors(config, RewardModelConfig)):
        raise ValueError("\n".join(errors))
    run = run_config(config)
    errors = [*range_errors(config, PAIR_RANGES), *_without_use(config), *_data(config)]
    errors += [*strategy_errors(run), *file_errors(run), *checkpoint_errors(run), *report_errors(run)]
    if errors:
        raise ValueError("\n".join(errors))


def _without_use(config: RewardModelConfig) -> Iterator[str]:
    """Flags of groups that the training of a policy has too, about what is not here."""
    strategy = config.strategy
    flags = {
        "critic_cpu_offload": strategy.critic_cpu_offload,
        "offload_actor": strategy.offload_actor,
        "offload_critic": strategy.offload_critic,
        "save_adapter": config.checkpoint.save_adapter,
        "save_token_log_probs": config.report.save_token_log_probs,
    }
    for name, is_set in flags.items():
        if is_set:
            yield f"{name} is for reinforcement learning: a reward model's training has no use for it. Drop --{name}."


def _data(config: RewardModelConfig) -> Iterator[str]:
    data = config.data
    yield from source_errors("train_data", data.train_data)
    yield from source_errors("eval_data", data.eval_data)
    if data.system_prompt is not None and not data.apply_chat_template:
        yield "system_prompt is a message of the chat template: apply_chat_template=False. Add --apply_chat_template."
    if config.train.eval_steps > 0 and data.eval_data is None:
        yield (
            f"eval_steps evaluates on eval_data: eval_steps={config.train.eval_steps}, and eval_data is unset. "
            "Set --eval_data, or drop --eval_steps."
        )
