"""Every flag, as frozen dataclasses by owner.

The command line and YAML are derived from these classes: a field's name is its flag, its docstring the help text.
"""

from dataclasses import dataclass, field
from typing import Literal

KLEstimator = Literal["k1", "k2", "k3"]
EngineType = Literal["torch", "vllm", "sglang"]
SleepLevel = Literal[1, 2]
WeightCheck = Literal["off", "sample", "full"]
Packing = Literal["auto", "packed", "padded"]
LRScheduler = Literal["constant", "linear", "cosine"]
TailBatch = Literal["drop", "pad"]
TeacherAPI = Literal["openai", "sglang"]
ZeroStage = Literal[1, 2, 3]
OverlongPrompts = Literal["filter", "truncate", "error"]
MediaErrors = Literal["stop", "skip"]
RewardResidency = Literal["all", "one"]
RewardErrors = Literal["stop", "exclude"]
REWARD_NAMES = ("exact_match", "contains_answer", "last_number")
"""Built-in rewards: the keys of `lightrft.rewards.builtin.REWARDS`, which this layer cannot import."""
RULE_NAMES = (
    "answer",
    "geo3k",
    "choice",
    "exact",
    "fuzzy",
    "countdown",
    "code",
    "format",
    "think_box",
    "length",
    "overlong",
)
"""Rules, which are built in as well: the keys of `lightrft.rewards.rules.RULES`."""
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
    """Folder (or hub id) of the causal language model, with media or of text alone, that the actor and the reference
    start from."""
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
    freeze_prefix: tuple[str, ...] = ()
    """Weights that do not learn: beginnings of their names, in whole parts, such as visual or model.visual.blocks.0."""
    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass instead of keeping its activations."""
    packing: Packing = "auto"
    """Layout of a micro-batch: one row without padding, right-padded rows, or packed where ragged attention runs."""
    chunk_size: int = 192
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
    image_key: str = "images"
    """Column of a prompt's images, one or a list: paths from the data file's folder on, encoded bytes, base64 or data
    URLs (docs/media.md). With the next two it is read where the model takes such media."""
    video_key: str = "videos"
    """Column of a prompt's videos, written as --image_key's."""
    audio_key: str = "audios"
    """Column of a prompt's sounds, written as --image_key's."""
    allow_media_urls: bool = False
    """Fetch media that a row names as http://... or https://...; without it, such a row is an error."""
    media_errors: MediaErrors = "stop"
    """A row whose media are missing or broken: ends the run before it begins, or is left out, with its path and the
    count."""
    media_workers: int | None = None
    """Processes on each node that decode media, shared by its ranks, at least one for each; unset: half of the node's
    CPUs, at most four for each rank. 0 decodes in the ranks themselves."""
    image_min_pixels: int | None = None
    """Pixels of an image at least, for engine and trainer alike; unset: what the model's processor says."""
    image_max_pixels: int | None = None
    """Pixels of an image at most: larger ones are scaled down; unset: what the model's processor says."""
    video_fps: float = 2.0
    """Frames taken of a second of video."""
    video_max_frames: int = 64
    """Frames taken of a video at most."""
    video_max_pixels: int | None = None
    """Pixels of a frame at most: larger ones are scaled down; unset: what the model's processor says."""
    max_samples: int | None = None
    """Use only this many rows of each source of --prompt_data."""
    max_eval_samples: int = 500
    """Use only this many rows of each source of --eval_data."""
    tail_batch: TailBatch = "drop"
    """Rows of an episode that do not fill a rollout batch: left out, or filled up from the next episode's order."""


@dataclass(frozen=True)
class RolloutConfig:
    engine_type: EngineType = "torch"
    """Engine that generates: torch is built in and runs on CPU and GPU; vllm and sglang need pip install
    'lightrft[vllm]' or 'lightrft[sglang]'."""
    engine_tp_size: int = 1
    """Ranks that generate together; WORLD_SIZE must be a multiple of it."""
    engine_mem_util: float = 0.5
    """torch: share of the memory free at the start of a rollout that keys, values and logits may take. vllm: share of
    the device's whole memory that weights, KV cache and activations of the engine may take. sglang: share of the memory
    free at its start that weights and KV cache may take; activations and CUDA graphs come on top."""
    enable_engine_sleep: bool = True
    """Free the engine's memory between rollouts. Off: --disable_engine_sleep."""
    engine_sleep_level: SleepLevel | None = None
    """While the engine sleeps, 1 moves its weights to the host (vllm) or leaves them on the device (sglang), 2 drops
    them until the next sync; unset: 2, sglang 1."""
    enforce_eager: bool = False
    """vllm and sglang run without CUDA graphs and torch.compile: they start sooner and generate slower."""
    weight_bucket_bytes: int = 512 * 2**20
    """Size of a bucket of weights on their way to the engine. A weight sync takes at most twice as much memory on a
    device, or twice the largest weight, SGLang's staging buffer included."""
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

    @property
    def sleep_level(self) -> SleepLevel | None:
        """The level at which the engine sleeps; None if never."""
        if not self.enable_engine_sleep:
            return None
        # A weight sync brings all weights, so that a copy on the host costs time and is used by nobody. SGLang, says
        # the runtime architecture (section 5), leaves its own where they are.
        return self.engine_sleep_level or (1 if self.engine_type == "sglang" else 2)

    @property
    def keeps_engine_weights(self) -> bool:
        """Whether they stay on the device while the engine sleeps."""
        return self.sleep_level is None or (self.engine_type == "sglang" and self.sleep_level == 1)


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
class AdamConfig:
    """What the optimizers of all models have in common."""

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
class OptimizerConfig(AdamConfig):
    actor_learning_rate: float = 1e-6
    """Peak learning rate of the actor."""
    critic_learning_rate: float = 9e-6
    """Peak learning rate of the critic."""


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
    """Steps such as 3,4 of which each rank writes a torch profiler trace, with phases, to `profile` in --save_path."""
    memory_snapshot_steps: str | None = None
    """Steps such as 3,4 of which each rank writes a snapshot of its GPU memory, to `profile` in --save_path."""
    print_memory_ledger: bool = False
    """Show after each step what rank 0 held in each phase, by owner; its peaks by owner are in metrics.jsonl too."""


@dataclass(frozen=True)
class RewardConfig:
    reward_fn: str | None = None
    """A built-in reward's name, or your own function as module:function or path/to/file.py:function; unset: exact_match
    where no other flag names a reward. Rewards of several flags are added up."""
    reward_recipe: str | None = None
    """Weighted components by label, in the place of --reward_fn: a .yaml or .json file, or YAML text such as
    {gsm8k: {answer: 0.9, format: 0.1}}; the label "*" stands for all others (docs/rewards.md)."""
    reward_workers: int | None = None
    """Processes on each node that grade responses, shared by its ranks, at least one for each; unset: half of the
    node's CPUs."""
    reward_timeout_seconds: float = 30.0
    """Grading a response may take this long, a rank's batch of them twice as long; a function that gets the batch, or
    awaits something, 20 times as long."""
    reward_errors: RewardErrors = "stop"
    """A response whose grading fails, by an error that is not its own: ends the run, or is left out of the loss."""
    remote_rm_url: str | None = None
    """Server that grades responses, as http://host:5000/get_reward, by the protocol of docs/rewards.md; several that
    grade alike are separated by commas and take turns. LIGHTRFT_REWARD_API_KEY may hold a key."""
    remote_rm_batch_size: int = 8
    """Responses in a request to --remote_rm_url at most."""
    remote_rm_timeout_seconds: float = 120.0
    """--remote_rm_url must answer a request within it. One that fails for a passing reason is sent five times."""
    judge_url: str | None = None
    """Server of a language model that grades responses, as http://host:8000: it is asked at /v1/chat/completions, as
    OpenAI's is. Several are separated by commas. LIGHTRFT_JUDGE_API_KEY may hold a key."""
    judge_model: str | None = None
    """Name of the model at --judge_url."""
    judge_prompt: str | None = None
    """File of the text that a judge is sent, where {prompt}, {response}, {label}, {reference} and the ends of
    --judge_range, {low} and {high}, stand for themselves; unset: a text that asks for a last line such as Score: 7."""
    judge_pattern: str | None = None
    """Regular expression whose one group is the score in what the judge writes, at its last match; unset: the number
    after Score:."""
    judge_range: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score of a judge; as rewards they are 0 and 1. Another score is an error."""
    judge_timeout_seconds: float = 120.0
    """--judge_url must answer a request within it. One that fails for a passing reason is sent five times."""
    reward_requests: int = 256
    """Requests that a rank has under way at --remote_rm_url, or at --judge_url, at most."""
    reward_pretrain: str | None = None
    """Reward models that score here, each a component of the reward: the folder (or hub id) of a sequence classifier
    with one label, or several by name as JSON, such as {"helpful": "folder", "safe": "other"}."""
    reward_residency: RewardResidency = "all"
    """Reward models on the device while they score: all come, and each leaves after its turn; or one at a time."""
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
