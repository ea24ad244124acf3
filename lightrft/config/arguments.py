"""Every flag, as frozen dataclasses by owner.

The command line and YAML are derived from these classes: a field's name is its flag, its docstring the help text.
"""

from dataclasses import dataclass, field
from typing import Literal

KLEstimator = Literal["k1", "k2", "k3"]
EngineType = Literal["torch", "vllm"]
SleepLevel = Literal[1, 2]
WeightCheck = Literal["off", "sample", "full"]
Packing = Literal["auto", "packed", "padded"]
LRScheduler = Literal["constant", "linear", "cosine"]
TailBatch = Literal["drop", "pad"]
TeacherAPI = Literal["openai", "sglang"]
ZeroStage = Literal[1, 2, 3]
OverlongPrompts = Literal["filter", "truncate", "error"]
REWARD_NAMES = ("exact_match", "contains_answer", "last_number")
"""Built-in rewards: the keys of `lightrft.rewards.builtin.REWARDS`, which this layer cannot import."""
ADVANTAGE_NAMES = (
    "gae",
    "group_norm",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_baseline",
    "reinforce++",
    "reinforce++_baseline",
    "remax",
    "cpgd",
    "grpo_passk",
    "on_policy_distillation",
)
"""Built-in estimators: the keys of `lightrft.ops.advantages.ADVANTAGE_ESTIMATORS`."""
POLICY_LOSS_NAMES = ("ppo_clip", "gspo", "gmpo", "cpgd", "cispo", "sapo", "policy_gradient")
"""Built-in policy losses: the keys of `lightrft.ops.losses.POLICY_LOSSES`."""
GROUP_ESTIMATORS = (
    "group_norm",
    "dr_grpo",
    "rloo",
    "reinforce_baseline",
    "reinforce++_baseline",
    "cpgd",
    "grpo_passk",
)
"""Estimators that compare the samples of a prompt: a single one teaches nothing."""
WHITENED_ESTIMATORS = ("reinforce++", "reinforce++_baseline")
"""Estimators whose advantages are whitened over all ranks, with or without --advantages_norm."""
SAMPLE_LOSSES = ("gspo", "gmpo", "sapo")
"""Policy losses whose papers weigh samples alike, whatever their length."""
CLIPPING_LOSSES = ("ppo_clip", "gspo")
"""Policy losses that can clip a second time, at --dual_clip."""
LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
RolloutCorrection = Literal["none", "tis", "sequence_tis", "mis", "sequence_mis", "icepop"]
OldLogProbs = Literal["actor", "engine"]


@dataclass(frozen=True)
class ModelConfig:
    pretrain: str
    """Folder (or hub id) of the causal language model that the actor and the reference start from."""
    critic_pretrain: str | None = None
    """Folder (or hub id) of the critic's trunk; unset: the same as --pretrain. Read by --advantage_estimator gae."""
    teacher_pretrain: str | None = None
    """Folder (or hub id) of a teacher with the actor's tokenizer: what it finds likelier than the actor does is learned
    (on-policy distillation), alone with --advantage_estimator on_policy_distillation, else beside the reward."""
    teacher_url: str | None = None
    """Server of such a teacher in its place, as http://host:8000; several of one model are separated by commas. Its
    context must be longer than --prompt_max_len + --generate_max_len. LIGHTRFT_TEACHER_API_KEY may hold a key."""
    teacher_api: TeacherAPI = "openai"
    """What --teacher_url is asked: prompt_logprobs of /v1/completions, as vLLM's server has them, or SGLang's
    /generate."""
    teacher_timeout_seconds: float = 120.0
    """--teacher_url must answer a request within it. One that fails for a passing reason is sent five times."""
    bf16: bool = False
    """Compute in bf16 over fp32 master weights and fp32 Adam moments; frozen roles are stored in bf16."""
    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass instead of keeping its activations."""
    packing: Packing = "auto"
    """Layout of a micro-batch: one row without padding, right-padded rows, or packed where ragged attention runs."""
    chunk_size: int = 128
    """Response tokens whose logits exist at the same time in the actor's head."""
    lora_rank: int = 0
    """Rank of an adapter (LoRA) on the actor's linear layers, which alone learns; 0 trains all weights."""
    lora_alpha: int = 16
    """The adapter's product is scaled by this / rank, with --use_rslora by this / sqrt(rank)."""
    lora_dropout: float = 0.0
    """Must be 0: with dropout the policy that is trained is not the one that sampled."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Linear layers of the decoder that get the adapter, such as q_proj v_proj; all-linear: every one."""
    use_rslora: bool = False
    """Rank-stabilised scaling of the adapter."""
    lora_path: str | None = None
    """peft folder of an adapter that the actor starts from, with its rank, scaling and layers; the reference is then
    the model with that adapter."""

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher scores the samples too, here or behind a server."""
        return self.teacher_pretrain is not None or self.teacher_url is not None

    @property
    def trains_adapter(self) -> bool:
        """Whether the actor learns in an adapter, beside frozen weights."""
        return self.lora_rank > 0 or self.lora_path is not None


@dataclass(frozen=True)
class DataConfig:
    prompt_data: str | None = None
    """Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub id; several are separated by commas."""
    prompt_data_probs: str | None = None
    """Shares of several sources in every episode, such as 0.7,0.3; an episode ends with the first of them to run out.
    Unset: every row of all sources."""
    prompt_split: str = "train"
    """Split of --prompt_data, where it is a folder or a hub id."""
    pretrain_data: str | None = None
    """Texts, under --input_key, whose next-token loss is mixed into the actor's (PPO-ptx), written as --prompt_data is.
    Each optimizer step draws --train_batch_size of them."""
    pretrain_split: str = "train"
    """Split of --pretrain_data, where it is a folder or a hub id."""
    eval_data: str | None = None
    """Prompts for evaluation, written as --prompt_data is."""
    eval_split: str = "test"
    """Split of --eval_data, where it is a folder or a hub id."""
    input_key: str = "input"
    """Column of the prompt: a text, or with --apply_chat_template a list of messages as well."""
    label_key: str = "label"
    """Column handed to the reward function as `label`; it must be in every row."""
    reference_key: str = "reference"
    """Column handed to the reward function as `reference`, where a row has it."""
    apply_chat_template: bool = False
    """Write the prompt with the tokenizer's chat template; a text becomes one message of the user."""
    system_prompt: str | None = None
    """System message in front of every prompt, in the place of the row's own. Read by --apply_chat_template."""
    input_template: str | None = None
    """Text around a plain prompt, which stands for its {}; other braces are written twice: {{}}."""
    prompt_max_len: int = 1024
    """Tokens of a prompt at most; --overlong_prompts says what becomes of longer ones."""
    overlong_prompts: OverlongPrompts = "filter"
    """Prompts of more than --prompt_max_len tokens: left out, cut to their last tokens (a BOS stays), or an error."""
    max_samples: int | None = None
    """Use only this many rows of each source of --prompt_data."""
    max_eval_samples: int = 500
    """Use only this many rows of each source of --eval_data."""
    tail_batch: TailBatch = "drop"
    """Rows of an episode that do not fill a rollout batch: left out, or filled up from the next episode's order."""


@dataclass(frozen=True)
class RolloutConfig:
    engine_type: EngineType = "torch"
    """Engine that generates: torch is built in and runs on CPU and GPU; vllm needs pip install 'lightrft[vllm]'."""
    engine_tp_size: int = 1
    """Ranks that generate together; WORLD_SIZE must be a multiple of it."""
    engine_mem_util: float = 0.5
    """torch: share of the memory free at the start of a rollout that keys, values and logits may take. vllm: share of
    the device's whole memory that weights, KV cache and activations of the engine may take."""
    enable_engine_sleep: bool = True
    """Free the engine's memory between rollouts. Off: --disable_engine_sleep."""
    engine_sleep_level: SleepLevel | None = None
    """1 moves the engine's weights to the host while it sleeps, 2 drops them until the next sync; unset: 2."""
    enforce_eager: bool = False
    """vllm runs without CUDA graphs and torch.compile: it starts sooner and generates slower."""
    weight_bucket_bytes: int = 512 * 2**20
    """Size of a bucket of weights on their way to the engine. A weight sync takes at most twice as much memory on a
    device, or twice the largest weight."""
    weight_check: WeightCheck = "sample"
    """After each weight sync, load a few of the weights once more (sample; all have their turn) or all of them (full):
    a bit that changes in the engine stops the run. off does not."""
    rollout_batch_size: int = 512
    """Prompts per step, over all ranks."""
    n_samples_per_prompt: int = 1
    """Responses per prompt."""
    dynamic_sampling: bool = False
    """Train on prompts whose rewards differ: draw others in the place of those whose rewards are all equal (DAPO)."""
    dynamic_sampling_tries: int = 4
    """Batches of prompts that a step draws at most; prompts with equal rewards fill what is still missing then."""
    generate_max_len: int = 1024
    """New tokens per response at most."""
    temperature: float = 1.0
    """Sampling temperature. The actor, the reference and the old policy are scored at it too."""
    use_fire: bool = False
    """Draw the first token of each response at --first_token_temperature, and leave it out of the loss: the policy has
    not chosen it (FIRE). For --engine_type torch."""
    first_token_temperature: float = 10.0
    """Sampling temperature of the first token. Read by --use_fire."""
    top_p: float = 1.0
    """Nucleus sampling: the smallest set of tokens with this much probability. Log-probs stay full-vocabulary."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the tokenizer's and the model's end tokens."""


@dataclass(frozen=True)
class AlgorithmConfig:
    advantage_estimator: str = "gae"
    """gae trains a critic; group_norm (GRPO), rloo and others compare a prompt's samples, `lightrft explain
    --algorithms` lists all; or your own function, as module:function or path/to/file.py:function."""
    policy_loss: str = "ppo_clip"
    """ppo_clip is PPO's clipped surrogate, `lightrft explain --algorithms` lists all; or your own function, as
    module:function or path/to/file.py:function."""
    loss_agg_mode: LossAggMode | None = None
    """Mean over the tokens of an optimizer step; or over its samples, of the mean or the sum of their tokens, or of the
    sum over --generate_max_len. Unset: seq-mean-token-mean for gspo, gmpo and sapo, else token-mean."""
    init_kl_coef: float = 0.01
    """Weight of the KL divergence from the reference model; 0 loads no reference model."""
    kl_target: float | None = None
    """KL divergence in nats per token that an adaptive coefficient steers to; unset: the coefficient stays fixed."""
    kl_horizon: int = 10_000
    """Samples over which the adaptive coefficient corrects an error."""
    kl_estimator: KLEstimator = "k1"
    """Per-token estimator of the KL divergence. A KL loss needs k2 or k3."""
    use_kl_loss: bool = False
    """Add the KL divergence to the loss instead of taking it off the reward."""
    eps_clip: float = 0.2
    """The policy ratio is clipped to 1 - eps .. 1 + eps."""
    eps_clip_high: float | None = None
    """The upper bound is 1 + this; unset: as --eps_clip."""
    dual_clip: float | None = None
    """At a negative advantage, a ratio above this costs no more than this one; above 1. Unset: any cost."""
    policy_drift_coef: float = 0.0
    """Weight of the pull back to the old policy in --policy_loss cpgd."""
    sapo_tau_pos: float = 1.0
    """How fast the gate of --policy_loss sapo closes at positive advantages."""
    sapo_tau_neg: float = 1.05
    """How fast the gate of --policy_loss sapo closes at negative advantages."""
    value_clip: float = 0.2
    """The critic's value is clipped to within this distance of its old value; 0 does not clip."""
    gamma: float = 1.0
    """Discount per token."""
    lambd: float = 0.95
    """GAE's lambda."""
    advantages_norm: bool = False
    """Whiten the advantages over all tokens of the step."""
    advantage_clip: float = 0.0
    """Advantages are clipped to within this distance of 0; 0 does not clip."""
    high_entropy_token_ratio: float = 0.0
    """Only this share of the step's tokens, those with the highest entropy, moves the policy; 0 takes all."""
    ptx_coef: float = 0.05
    """Weight of the loss on --pretrain_data, a mean over tokens."""
    opd_kl_coef: float = 1.0
    """Weight of the reverse KL divergence from the teacher in the advantages."""
    overlong_filter: bool = False
    """Truncated responses count among their prompt's rewards, and leave the loss."""
    old_log_probs: OldLogProbs = "actor"
    """Who scores the policy that sampled: the actor, in a forward of its own, or the engine, whose numbers differ a
    little."""
    rollout_correction: RolloutCorrection = "none"
    """Weight for the difference between engine and actor: truncated (tis) or masked (mis) importance sampling of tokens
    or whole samples (sequence_), or icepop, which masks tokens in both directions."""
    correction_high: float = 2.0
    """Ratio of actor to engine at which --rollout_correction cuts."""
    correction_low: float = 0.5
    """Ratio below which --rollout_correction icepop masks a token."""
    truncation_bootstrap: bool = False
    """GAE of a truncated response goes on with the critic's value after its last token."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    freezing_actor_steps: int = 0
    """Train only the critic in this many first steps."""

    @property
    def trains_critic(self) -> bool:
        """Whether a critic is in the run: gae reads its values; a user's own estimator is given none."""
        return self.advantage_estimator == "gae"

    @property
    def rolls_out_greedily(self) -> bool:
        """Whether each prompt gets a greedy response too, whose reward is the baseline."""
        return self.advantage_estimator == "remax"


@dataclass(frozen=True)
class OptimizerConfig:
    actor_learning_rate: float = 1e-6
    """Peak learning rate of the actor."""
    critic_learning_rate: float = 9e-6
    """Peak learning rate of the critic."""
    lr_scheduler: LRScheduler = "cosine"
    """What the rate does after the warm-up."""
    lr_warmup_ratio: float = 0.03
    """Share of all optimizer steps over which the rate rises from 0; --lr_warmup_steps comes before it."""
    lr_warmup_steps: int | None = None
    """Optimizer steps over which the rate rises from 0."""
    min_lr_ratio: float = 0.1
    """The schedule ends at this share of the peak rate."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of Adam's moments."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    l2: float = 0.0
    """Decoupled weight decay; biases and norm weights do not decay."""
    max_norm: float = 1.0
    """Gradients are clipped to this global norm, for each model; 0 does not clip."""
    max_nonfinite_steps: int = 5
    """A step whose loss or gradient is not finite is skipped; after this many in a row the run stops."""


@dataclass(frozen=True)
class TrainConfig:
    train_batch_size: int = 128
    """Responses per optimizer step, over all ranks."""
    micro_train_batch_size: int = 4
    """Responses per forward on one rank."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens per forward on one rank; where set, it rules instead of --micro_train_batch_size."""
    num_episodes: int = 1
    """Passes over the prompts."""
    max_epochs: int = 1
    """Passes over the experiences of one step."""
    max_steps: int | None = None
    """Stop after this many steps (a rollout and its updates)."""
    seed: int = 42
    """Seed of the data order, of sampling and of new weights."""
    save_path: str = "./ckpt"
    """Run folder: configuration, metrics, samples, summary, reward curve, TensorBoard files and the final model."""


@dataclass(frozen=True)
class StrategyConfig:
    fsdp: bool = False
    """Train with FSDP2; without it, with DeepSpeed."""
    zero_stage: ZeroStage | None = None
    """DeepSpeed, without --fsdp, deals over the ranks: 1 Adam's state, 2 gradients too, 3 weights too; unset: 2."""
    fsdp_cpu_offload: bool = False
    """FSDP2 keeps parameters, gradients and optimizer state of actor and critic on the host."""
    critic_cpu_offload: bool = False
    """FSDP2 keeps parameters, gradients and optimizer state of the critic alone on the host."""
    adam_offload: bool = False
    """Optimizer state lives on the host between training phases."""
    offload_actor: bool = False
    """The actor's weights wait on the host while the engine generates."""
    offload_critic: bool = False
    """The critic's weights are on the device only while it scores or learns."""
    dist_timeout_seconds: float = 1800.0
    """Timeout of every collective, and of the watch that names the rank which is missing."""


@dataclass(frozen=True)
class CheckpointConfig:
    ckpt_path: str | None = None
    """Folder of the checkpoints, on a file system that all nodes share; unset: `checkpoints` in --save_path. Set, it
    also saves one when the run ends or is stopped by a signal, as --save_steps does."""
    save_steps: int = -1
    """Save a checkpoint after every so many steps, and when the run ends or is stopped by a signal; -1 does not."""
    max_ckpt_num: int = 3
    """Checkpoints that are kept: this many newest ones, and the best by its reward."""
    load_checkpoint: bool = False
    """Go on from the newest complete checkpoint of --ckpt_path, or start where there is none."""
    save_hf_ckpt: bool = False
    """Write each checkpoint as a Hugging Face model too, in its folder `hf`."""
    save_adapter: bool = False
    """Write the models of --save_hf_ckpt and of the end as peft folders of the adapter, not merged into the model."""


@dataclass(frozen=True)
class EvaluationConfig:
    eval_steps: int = -1
    """Evaluate on --eval_data after every so many steps too; -1 evaluates at the start and at the end alone."""
    eval_temperature: float | None = None
    """Sampling temperature of evaluation, 0 for greedy; unset: --temperature."""
    eval_n_samples_per_prompt: int = 1
    """Responses per prompt of evaluation: pass@k for k = 1, 2, 4, ... up to it, and a majority vote among them."""
    eval_pass_threshold: float = 1.0
    """Reward from which on a response passes, in pass@k."""


@dataclass(frozen=True)
class ReportConfig:
    save_token_log_probs: bool = False
    """Write each sample's token ids and log-probs (rollout, actor, reference) to samples.jsonl too."""
    use_wandb: bool = False
    """Report to Weights & Biases too, under its own login; offline with WANDB_MODE=offline, which needs none."""
    wandb_project: str = "lightrft"
    """Project of the run there."""
    wandb_run_name: str | None = None
    """Name of the run there; unset: one that Weights & Biases makes up."""
    wandb_group: str | None = None
    """Group of the run there."""
    wandb_org: str | None = None
    """Team or user that the project belongs to; unset: the login's own."""
    profile_steps: str | None = None
    """Steps such as 3,4 of which each rank writes a torch profiler trace, to `profile` in --save_path."""
    memory_snapshot_steps: str | None = None
    """Steps such as 3,4 of which each rank writes a snapshot of its GPU memory, to `profile` in --save_path."""
    print_memory_ledger: bool = False
    """Show after each step what rank 0 held in each phase, by owner; its peaks by owner are in metrics.jsonl too."""


@dataclass(frozen=True)
class RewardConfig:
    reward_fn: str = "exact_match"
    """A built-in reward's name, or your own function as module:function or path/to/file.py:function."""
    overlong_buffer: bool = False
    """Take a penalty off the reward of responses that come near --generate_max_len (DAPO)."""
    overlong_buffer_len: int = 1024
    """Tokens before --generate_max_len over which the penalty grows."""
    overlong_buffer_penalty_factor: float = 1.0
    """The penalty at --generate_max_len."""
    reward_running_norm: bool = False
    """Divide rewards by the standard deviation of all rewards of the run so far."""
    reward_running_norm_minus_mean: bool = False
    """Take their mean off too."""
    reward_clip: float = 0.0
    """Rewards are clipped to within this distance of 0, after all that; 0 does not clip."""


@dataclass(frozen=True)
class Config:
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
