"""Upstream flags: what becomes of each flag of public LightRFT here, so that its scripts carry over."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightrft.config.flags import field_of_spelling


@dataclass(frozen=True)
class Same:
    """A flag here too."""

    note: str = ""
    """What differs."""


@dataclass(frozen=True)
class Renamed:
    """Other tokens stand for it."""

    to: tuple[str, ...]
    takes_value: bool = False
    """Each of them is a flag that gets the value."""


@dataclass(frozen=True)
class Switch:
    """A flag here too, but one without a value; the value that upstream gives it is dropped with one warning."""

    note: str


@dataclass(frozen=True)
class Valued:
    """A flag here too, but one with values; upstream's, which has none, is dropped with one warning."""

    why: str


@dataclass(frozen=True)
class Accepted:
    """Dropped with one warning: without it the run does what its user expects."""

    why: str
    takes_value: bool = False
    only: tuple[str, ...] | None = None
    """The values that ask for nothing; any other is refused. None: every value."""


@dataclass(frozen=True)
class Refused:
    """A usage error: without it the run would not do what the flag promises."""

    remedy: str
    why: str = "is not supported yet"


Fate: TypeAlias = Same | Renamed | Switch | Valued | Accepted | Refused

UPSTREAM_FLAGS: dict[str, tuple[str, ...]] = {
    "Engine and rollout": (
        "engine_type",
        "engine_tp_size",
        "engine_mem_util",
        "enable_engine_sleep",
        "disable_engine_sleep",
        "rm_use_engine",
        "rm_engine_cudagraph",
        "limit_mm_image_per_prompt",
        "limit_mm_video_per_prompt",
        "temperature",
        "top_p",
        "use_fire",
        "first_token_temperature",
    ),
    "Loop and batch sizes": (
        "num_episodes",
        "rollout_batch_size",
        "micro_rollout_batch_size",
        "n_samples_per_prompt",
        "train_batch_size",
        "micro_train_batch_size",
        "max_epochs",
        "prompt_max_len",
        "generate_max_len",
        "max_len",
        "max_samples",
        "seed",
        "freezing_actor_steps",
        "freeze_prefix",
    ),
    "Advantages, losses and rewards": (
        "advantage_estimator",
        "eps_clip",
        "value_clip",
        "gamma",
        "lambd",
        "init_kl_coef",
        "kl_target",
        "kl_estimator",
        "use_kl_loss",
        "use_cpg_loss",
        "loss_agg_mode",
        "use_gspo",
        "normalize_advantages",
        "use_sequence_rewards",
        "high_entropy_token_ratio",
        "dynamic_sampling",
        "overlong_buffer",
        "overlong_buffer_len",
        "overlong_buffer_penalty_factor",
        "reward_running_norm",
        "reward_running_norm_minus_mean",
        "reward_clip",
        "advantages_norm",
        "advantage_clip",
        "normalize_reward_for_critic",
        "ptx_coef",
        "pretrain_data",
        "pretrain_data_probs",
        "pretrain_split",
        "aux_loss_coef",
    ),
    "Optimiser": (
        "actor_learning_rate",
        "critic_learning_rate",
        "lr_warmup_ratio",
        "adam_betas",
        "l2",
        "max_norm",
    ),
    "Distribution, precision and memory": (
        "fsdp",
        "fsdp_cpu_offload",
        "use_mp_opt",
        "adam_offload",
        "zero_stage",
        "zpg",
        "grad_accum_dtype",
        "overlap_comm",
        "bf16",
        "flash_attn",
        "gradient_checkpointing",
        "gradient_checkpointing_use_reentrant",
        "sp_size",
        "packing_samples",
        "mixed_mm_data",
        "fused_linear_logprob",
        "chunk_size",
        "meta_init",
        "initial_model_shard_size",
        "actor_init_on_gpu",
        "enable_ema",
        "disable_fast_tokenizer",
        "no_shard_vit",
        "disable_logprobs_flashattn",
        "load_in_4bit",
        "local_rank",
        "lora_rank",
        "lora_alpha",
        "target_modules",
        "lora_dropout",
    ),
    "Models and data": (
        "pretrain",
        "reward_pretrain",
        "remote_rm_url",
        "critic_pretrain",
        "value_head_prefix",
        "text_only",
        "prompt_data",
        "prompt_data_probs",
        "prompt_split",
        "eval_data",
        "eval_split",
        "max_eval_samples",
        "input_key",
        "images_key",
        "reference_key",
        "label_key",
        "input_template",
        "apply_chat_template",
        "system_prompt",
        "system_prompt_path",
        "fps",
        "max_pixels",
        "use_ms",
    ),
    "Checkpoints, evaluation and reports": (
        "save_path",
        "ckpt_path",
        "ckpt_path_local",
        "save_steps",
        "save_hf_ckpt",
        "disable_ds_ckpt",
        "max_ckpt_num",
        "max_ckpt_mem",
        "load_checkpoint",
        "save_value_network",
        "logging_steps",
        "eval_steps",
        "log_dir",
        "plot_every",
        "save_trajectories",
        "num_trajectories_to_save",
        "mark_high_entropy_tokens",
        "trajectory_analysis",
        "print_replay_buffer_stats",
        "use_wandb",
        "wandb_org",
        "wandb_group",
        "wandb_project",
        "wandb_run_name",
        "use_tensorboard",
    ),
}
"""Every flag of the `train_colocate.py` scripts of public LightRFT v0.1.1 (2026-03), by subject."""

FATES: dict[str, Fate] = {
    # Flags here too that need a word.
    "temperature": Same("the actor, the reference and the old policy are scored at it too"),
    "freeze_prefix": Valued("without a name it freezes nothing: write --freeze_prefix visual for a vision tower"),
    "freezing_actor_steps": Same("0 is off, not -1"),
    "l2": Same("biases and norm weights do not decay"),
    "prompt_max_len": Same("longer prompts are left out; `--overlong_prompts truncate` cuts them off on the left"),
    "eval_data": Same("unset: no evaluation; write the value of --prompt_data to evaluate on its --eval_split"),
    "use_wandb": Switch("the login is Weights & Biases' own: run `wandb login`, or set WANDB_API_KEY"),
    "packing_samples": Renamed(("--packing", "packed")),
    "images_key": Renamed(("--image_key",), takes_value=True),
    "fps": Renamed(("--video_fps",), takes_value=True),
    "max_pixels": Renamed(("--image_max_pixels", "--video_max_pixels"), takes_value=True),
    "use_cpg_loss": Renamed(("--policy_loss", "cpgd")),
    "use_gspo": Renamed(("--policy_loss", "gspo")),
    "loss_agg_mode": Same("read here, and token-mean where unset; public LightRFT averages over samples"),
    "dynamic_sampling": Same("prompts with equal rewards are replaced by others, not only masked"),
    "high_entropy_token_ratio": Same("a share of the whole step's tokens, and 0 is off"),
    "advantages_norm": Same("over the tokens of all ranks"),
    "reward_running_norm": Same("over the rewards of all ranks"),
    "reward_clip": Same("0 is off"),
    "reward_pretrain": Same("sequence classifiers with one label"),
    "remote_rm_url": Same("its protocol is in docs/rewards.md; several URLs are separated by commas"),
    "pretrain_data": Same("texts stand under --input_key; each optimizer step draws --train_batch_size of them"),
    "use_fire": Same("the first token is left out of the loss; for --engine_type torch"),
    "advantage_clip": Same("0 is off"),
    # What changes nothing: settings of what is not in the run, or of what is always so.
    "rm_use_engine": Accepted("reward models are classifiers, and compute without an engine"),
    "rm_engine_cudagraph": Accepted("reward models are classifiers, and compute without an engine"),
    "micro_rollout_batch_size": Accepted(
        "one plan of micro-batches, by --micro_train_batch_size or --max_tokens_per_micro_batch, serves all roles",
        takes_value=True,
    ),
    "pretrain_data_probs": Accepted("texts of all sources are drawn alike", True, ("1.0",)),
    "use_sequence_rewards": Accepted("rewards are of whole responses"),
    "use_mp_opt": Accepted("--bf16 always means fp32 master weights and Adam moments"),
    "zero_stage": Same("a usage error beside --fsdp, which deals out what stage 3 does"),
    "zpg": Accepted("1 is off", True, ("1",)),
    "grad_accum_dtype": Accepted("gradients are always summed in fp32", takes_value=True),
    "overlap_comm": Accepted("DeepSpeed's own default holds; the numbers are the same"),
    "disable_ds_ckpt": Accepted("a checkpoint always holds what a run needs to go on"),
    "flash_attn": Accepted("attention is chosen by --packing"),
    "gradient_checkpointing_use_reentrant": Accepted("--gradient_checkpointing never is; the gradients are the same"),
    "fused_linear_logprob": Accepted("log-probs are always computed in chunks of --chunk_size tokens"),
    "meta_init": Accepted("models are always built without memory, and filled shard by shard"),
    "initial_model_shard_size": Accepted("the reference is sharded over all ranks", takes_value=True),
    "actor_init_on_gpu": Accepted("each shard is filled where it lives"),
    "disable_fast_tokenizer": Accepted("transformers 5 has one kind of tokenizer"),
    "no_shard_vit": Accepted("a text model has no vision tower"),
    "disable_logprobs_flashattn": Accepted("attention is chosen by --packing"),
    "local_rank": Accepted("torchrun sets LOCAL_RANK in the environment", takes_value=True),
    "value_head_prefix": Accepted("the critic's value head starts at 0 and is read from no folder", takes_value=True),
    "text_only": Accepted("rows without media are text"),
    "mixed_mm_data": Accepted("rows with media and without always mix"),
    "limit_mm_image_per_prompt": Accepted("a prompt may have any number of images", takes_value=True),
    "limit_mm_video_per_prompt": Accepted("a prompt may have any number of videos", takes_value=True),
    "save_value_network": Accepted("checkpoints hold the critic"),
    "logging_steps": Accepted("every step is logged", takes_value=True),
    "log_dir": Accepted("all records go to the run folder, --save_path", takes_value=True),
    "plot_every": Accepted("the reward curve is drawn at the end", takes_value=True),
    "save_trajectories": Accepted("samples.jsonl always holds every response"),
    "num_trajectories_to_save": Accepted("samples.jsonl always holds every response", takes_value=True),
    "mark_high_entropy_tokens": Accepted("samples.jsonl marks no tokens"),
    "trajectory_analysis": Accepted("metrics.jsonl has lengths and truncation; samples.jsonl has the responses"),
    "print_replay_buffer_stats": Accepted("metrics.jsonl has rewards, lengths and truncation of every step"),
    "use_tensorboard": Accepted("TensorBoard files are always written, to --save_path/tensorboard", takes_value=True),
    # What changes nothing at a value that upstream's scripts and defaults give it.
    "aux_loss_coef": Accepted("0 is off", True, ("0", "0.0")),
    "sp_size": Accepted("1 is off", True, ("1",)),
    # What a run would not do.
    "max_len": Refused("Set --prompt_max_len and --generate_max_len.", "would override two limits"),
    "normalize_advantages": Refused("Set --advantages_norm.", "is read nowhere in public LightRFT"),
    "normalize_reward_for_critic": Refused("Set --reward_running_norm."),
    "enable_ema": Refused("Drop it: the model that is saved is the one that was trained."),
    "load_in_4bit": Refused("Drop it, and set --bf16 for frozen roles in two bytes a weight."),
    "system_prompt_path": Refused("Give the text itself to --system_prompt.", "reads no file"),
    "use_ms": Refused("Download the model, and give its folder to --pretrain.", "is not supported: ModelScope"),
    "ckpt_path_local": Refused("Set --ckpt_path, and copy from there.", "makes no second copy"),
    "max_ckpt_mem": Refused("Set --max_ckpt_num.", "counts no bytes"),
}
"""What the flags are that are none here, or that need a word; all others are the same."""

PREFACE = """# Flags of public LightRFT

What becomes of each flag of the `train_colocate.py` scripts of public LightRFT v0.1.1 (2026-03).

- same: a flag here too.
- renamed: other flags stand for it.
- accepted: dropped with one warning, since the run does what its user expects without it.
- refused: a usage error, since the run would not do what the flag promises.

Two things are to be added to a script: `--reward_recipe`, which says what the data's labels mean (public LightRFT has
that in its code), or `--reward_fn`; and `--eval_data` where it evaluates.

`lightrft/config/upstream.py` holds the table, and this page is written from it:
`python -c "from lightrft.config.upstream import *; print(markdown_table(), end='')" > docs/upstream_flags.md`"""


def fate_of(name: str) -> Fate | None:
    """What becomes of an upstream flag; None where nothing here knows it."""
    fate = FATES.get(name)
    if fate is not None:
        return fate
    return Same() if f"--{name}" in field_of_spelling() else None


def choices(values: Sequence[str]) -> str:
    """Values as a person writes them: `"" or {}`."""
    return " or ".join(value or '""' for value in values)


def markdown_table() -> str:
    """docs/upstream_flags.md."""
    lines = [PREFACE]
    for subject, names in UPSTREAM_FLAGS.items():
        lines += ["", f"## {subject}", "", "| flag | fate | |", "|---|---|---|"]
        lines += [f"| `--{name}` | {' | '.join(_described(fate_of(name)))} |" for name in names]
    return "\n".join(lines) + "\n"


def _described(fate: Fate | None) -> tuple[str, str]:
    match fate:
        case Same(note):
            return "same", note
        case Renamed(to, takes_value):
            return "renamed", f"`{' '.join(to)}`" + (", with its value" if takes_value else "")
        case Switch(note):
            return "same, without a value", note
        case Valued(why):
            return "same, with values", why
        case Accepted(why, _, None):
            return "accepted", why
        case Accepted(why, _, only):
            assert only is not None
            return f"accepted where {choices(only)}, else refused", why
        case Refused(remedy, why):
            return "refused", f"{why}. {remedy}"
        case None:
            return "unknown", ""
