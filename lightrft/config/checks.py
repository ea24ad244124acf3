"""Checks across flags, all made before anything is loaded."""

import importlib.util
import math
import os
import string
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightrft.config.algorithm_checks import algorithm_errors
from lightrft.config.alternatives import alternatives
from lightrft.config.arguments import (
    Config,
    ModelConfig,
)
from lightrft.config.engine_checks import engine_errors
from lightrft.config.flags import flag_values
from lightrft.config.function_checks import function_errors, reward_model_errors
from lightrft.config.kinds import kind_errors
from lightrft.config.remote_checks import remote_reward_errors
from lightrft.config.sources import FILE_ENDINGS, source_names, source_shares
from lightrft.config.steps import chosen_steps
from lightrft.config.unread_settings import unread_setting_errors

Range = tuple[str, Callable[[Any], bool]]

AT_LEAST_1: Range = ("at least 1", lambda value: value >= 1)
AT_LEAST_0: Range = ("at least 0", lambda value: value >= 0)
ABOVE_0: Range = ("above 0", lambda value: value > 0)
ABOVE_0_TO_1: Range = ("above 0 and at most 1", lambda value: 0 < value <= 1)
FROM_0_TO_1: Range = ("from 0 to 1", lambda value: 0 <= value <= 1)

RANGES: dict[str, Range] = {
    "chunk_size": AT_LEAST_1,
    "lora_rank": AT_LEAST_0,
    "lora_alpha": AT_LEAST_1,
    "lora_dropout": AT_LEAST_0,
    "teacher_timeout_seconds": ABOVE_0,
    "target_modules": ("names of layers", lambda value: value and "" not in value),
    "prompt_max_len": AT_LEAST_1,
    "media_workers": AT_LEAST_0,
    "image_min_pixels": AT_LEAST_1,
    "image_max_pixels": AT_LEAST_1,
    "video_fps": ABOVE_0,
    "video_max_frames": AT_LEAST_1,
    "video_max_pixels": AT_LEAST_1,
    "max_samples": AT_LEAST_1,
    "max_eval_samples": AT_LEAST_1,
    "engine_tp_size": AT_LEAST_1,
    "engine_mem_util": ABOVE_0_TO_1,
    "engine_sleep_level": ("1 or 2", lambda value: value in (1, 2)),
    "weight_bucket_bytes": AT_LEAST_1,
    "rollout_batch_size": AT_LEAST_1,
    "n_samples_per_prompt": AT_LEAST_1,
    "generate_max_len": AT_LEAST_1,
    # Greedy sampling has no gradient: every policy ratio is scored at this temperature.
    "temperature": ABOVE_0,
    "top_p": ABOVE_0_TO_1,
    "top_k": AT_LEAST_0,
    "stop": ("without empty strings", lambda value: "" not in value),
    "init_kl_coef": AT_LEAST_0,
    "kl_target": ABOVE_0,
    "kl_horizon": AT_LEAST_1,
    "eps_clip": ABOVE_0,
    "eps_clip_high": ABOVE_0,
    "dual_clip": ("above 1", lambda value: value > 1),
    "policy_drift_coef": AT_LEAST_0,
    "opd_kl_coef": ABOVE_0,
    "ptx_coef": ABOVE_0,
    "sapo_tau_pos": ABOVE_0,
    "sapo_tau_neg": ABOVE_0,
    "advantage_clip": AT_LEAST_0,
    "high_entropy_token_ratio": FROM_0_TO_1,
    "correction_high": ("at least 1", lambda value: value >= 1),
    "correction_low": FROM_0_TO_1,
    "dynamic_sampling_tries": AT_LEAST_1,
    "first_token_temperature": ABOVE_0,
    "remote_rm_batch_size": AT_LEAST_1,
    "remote_rm_timeout_seconds": ABOVE_0,
    "judge_range": ("a finite number and a larger one", lambda value: -math.inf < value[0] < value[1] < math.inf),
    "judge_timeout_seconds": ABOVE_0,
    "reward_requests": AT_LEAST_1,
    "reward_workers": AT_LEAST_1,
    "reward_timeout_seconds": ABOVE_0,
    "overlong_buffer_len": AT_LEAST_1,
    "overlong_buffer_penalty_factor": ABOVE_0,
    "reward_clip": AT_LEAST_0,
    "value_clip": AT_LEAST_0,
    "gamma": FROM_0_TO_1,
    "lambd": FROM_0_TO_1,
    "freezing_actor_steps": AT_LEAST_0,
    "actor_learning_rate": AT_LEAST_0,
    "critic_learning_rate": AT_LEAST_0,
    "lr_warmup_ratio": FROM_0_TO_1,
    "lr_warmup_steps": AT_LEAST_0,
    "min_lr_ratio": FROM_0_TO_1,
    "adam_betas": ("at least 0 and below 1", lambda value: all(0 <= beta < 1 for beta in value)),
    "adam_eps": ABOVE_0,
    "l2": AT_LEAST_0,
    "max_norm": AT_LEAST_0,
    "max_nonfinite_steps": AT_LEAST_1,
    "train_batch_size": AT_LEAST_1,
    "micro_train_batch_size": AT_LEAST_1,
    "max_tokens_per_micro_batch": AT_LEAST_1,
    "num_episodes": AT_LEAST_1,
    "max_epochs": AT_LEAST_1,
    "max_steps": AT_LEAST_1,
    "seed": AT_LEAST_0,
    "dist_timeout_seconds": ABOVE_0,
    "save_steps": ("-1 (off) or at least 1", lambda value: value == -1 or value >= 1),
    "max_ckpt_num": AT_LEAST_1,
    "eval_steps": ("-1 (off) or at least 1", lambda value: value == -1 or value >= 1),
    "eval_temperature": AT_LEAST_0,
    "eval_n_samples_per_prompt": AT_LEAST_1,
}
"""What a flag's value must be, where it is set."""
NEW_ADAPTER = ("lora_alpha", "target_modules", "use_rslora")
"""Settings of an adapter that --lora_rank adds."""


def check_config(
    config: Config, world_size: int, local_world_size: int | None = None, rows_of: Collection[str] = ()
) -> None:
    """Refuses settings that cannot work, before models, data or process groups exist.

    Args:
        config: All flags.
        world_size: Ranks of the run.
        local_world_size: Those on this node; None means that all are.
        rows_of: `prompt_data`, `eval_data` or both, where the caller has their rows itself.

    Raises:
        ValueError: some rule is broken; one line for each, `rule: values. remedy.`
    """
    # What is of a wrong kind cannot be compared.
    if errors := list(kind_errors(config)):
        raise ValueError("\n".join(errors))
    errors = list(range_errors(config))
    # The arithmetic below divides by sizes that these have to be right for.
    if not errors:
        errors += [*_rollout_groups(config, world_size, local_world_size), *_batch_arithmetic(config, world_size)]
    errors += [*engine_errors(config), *_adapter(config), *algorithm_errors(config), *strategy_errors(config)]
    errors += [*_rows(config, rows_of), *_data(config), *file_errors(config)]
    errors += [*checkpoint_errors(config), *unread_setting_errors(config, rows_of), *report_errors(config)]
    errors += [*function_errors(config), *reward_model_errors(config)]
    errors += remote_reward_errors(config)
    if errors:
        raise ValueError("\n".join(errors))


def check_launched(config: Config, rows_of: Collection[str] = ()) -> None:
    """`check_config` with the numbers of ranks that torchrun has set, or for one rank without it."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    check_config(config, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), rows_of)


def tp_size_error(world_size: int, tp_size: int) -> str | None:
    """What is wrong where `tp_size` does not divide the ranks into groups."""
    if tp_size >= 1 and world_size % tp_size == 0:
        return None
    return (
        f"WORLD_SIZE must be a multiple of engine_tp_size: {world_size} ranks, engine_tp_size={tp_size}. "
        f"Set --engine_tp_size to {alternatives(_divisors(world_size))}."
    )


def nearest_multiples(value: int, multiple: int) -> tuple[int | None, int]:
    """Largest positive multiple below `value`, or None, and the smallest above; `value` is no multiple itself."""
    below = value // multiple * multiple
    return below or None, below + multiple


def range_errors(config: Any, ranges: Mapping[str, Range] = RANGES) -> Iterator[str]:
    """Flags whose value alone is wrong: what follows from them cannot be computed."""
    for name, value in flag_values(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} must be finite: {name}={value}. Change --{name}."
        elif value is not None and name in ranges and not ranges[name][1](value):
            yield f"{name} must be {ranges[name][0]}: {name}={value}. Change --{name}."


def _rollout_groups(config: Config, world_size: int, local_world_size: int | None) -> Iterator[str]:
    tp_size = config.rollout.engine_tp_size
    if error := tp_size_error(world_size, tp_size):
        yield error
    elif local_world_size is not None and local_world_size % tp_size:
        fitting = _divisors(math.gcd(world_size, local_world_size))
        yield (
            f"A rollout group must lie inside one node, so LOCAL_WORLD_SIZE must be a multiple of engine_tp_size: "
            f"{local_world_size} of {world_size} ranks on this node, engine_tp_size={tp_size}. "
            f"Set --engine_tp_size to {alternatives(fitting)}."
        )


def _batch_arithmetic(config: Config, world_size: int) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    per_forward = 1 if train.max_tokens_per_micro_batch else train.micro_train_batch_size * world_size
    if train.train_batch_size % per_forward:
        yield (
            f"train_batch_size must be a multiple of micro_train_batch_size x ranks: {train.train_batch_size}, "
            f"{train.micro_train_batch_size} x {world_size} ranks = {per_forward}. "
            f"Set --train_batch_size to {alternatives(nearest_multiples(train.train_batch_size, per_forward))}."
        )
    num_responses = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    if num_responses % train.train_batch_size:
        yield (
            f"rollout_batch_size x n_samples_per_prompt must be a multiple of train_batch_size: "
            f"{rollout.rollout_batch_size} x {rollout.n_samples_per_prompt} = {num_responses}, "
            f"train_batch_size={train.train_batch_size}. {_rollout_remedy(config, per_forward)}."
        )


def _rollout_remedy(config: Config, per_forward: int) -> str:
    """The rollout batch sizes, and the train batch sizes that fit the micro-batches too, next to those given."""
    num_prompts, num_samples = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    batch_size = config.train.train_batch_size
    prompts = nearest_multiples(num_prompts, batch_size // math.gcd(batch_size, num_samples))
    remedy = f"Set --rollout_batch_size to {alternatives(prompts)}"
    fitting = [size for size in _divisors(num_prompts * num_samples) if size % per_forward == 0]
    below = max((size for size in fitting if size < batch_size), default=None)
    above = min((size for size in fitting if size > batch_size), default=None)
    return f"{remedy}, or --train_batch_size to {alternatives((below, above))}" if fitting else remedy


def _adapter(config: Config) -> Iterator[str]:
    model = config.model
    values, defaults = asdict(model), asdict(ModelConfig(""))
    given = [name for name in NEW_ADAPTER if values[name] != defaults[name]]
    if model.lora_path is not None:
        given += ["lora_rank"] if model.lora_rank > 0 else []
        other = f"lora_path={model.lora_path} brings its own. Drop --{{name}}, or --lora_path."
    else:
        given = [] if model.lora_rank > 0 else given
        other = "lora_rank=0 adds none. Set --lora_rank, or drop --{name}."
    for name in given:
        yield f"{name} is a setting of a new adapter: {name}={values[name]}, and {other.format(name=name)}"
    if model.freeze_prefix and model.trains_adapter:
        yield (
            "freeze_prefix is about all weights, and with an adapter it alone learns: both are asked for. Drop "
            "--freeze_prefix, or --lora_rank and --lora_path."
        )
    if config.checkpoint.save_adapter and not model.trains_adapter:
        yield "save_adapter writes the adapter alone: lora_rank=0 adds none. Set --lora_rank, or drop --save_adapter."


def strategy_errors(config: Config) -> Iterator[str]:
    strategy = config.strategy
    yield from _held_on_host(config)
    if strategy.fsdp and strategy.zero_stage is not None:
        yield (
            f"zero_stage is a setting of DeepSpeed, and fsdp trains with FSDP2: both are set, zero_stage="
            f"{strategy.zero_stage}. Drop --zero_stage (FSDP2 deals out what stage 3 does), or drop --fsdp."
        )
    if not strategy.fsdp and importlib.util.find_spec("deepspeed") is None:
        yield (
            "training without fsdp needs the package deepspeed, which is not installed. "
            "Run pip install 'lightrft[deepspeed]', or add --fsdp."
        )
    policies = {"fsdp_cpu_offload": strategy.fsdp_cpu_offload, "critic_cpu_offload": strategy.critic_cpu_offload}
    for name, is_set in policies.items():
        if is_set and not strategy.fsdp:
            yield f"{name} is a setting of FSDP2: fsdp=False. Add --fsdp, or drop --{name}."


def _held_on_host(config: Config) -> Iterator[str]:
    """Flags that have nothing to move: the role lives on the host, or is not in the run."""
    strategy = config.strategy
    of_critic = {"critic_cpu_offload": strategy.critic_cpu_offload, "offload_critic": strategy.offload_critic}
    moves = {"adam_offload": strategy.adam_offload, "offload_actor": strategy.offload_actor} | of_critic
    for name, is_set in moves.items():
        if is_set and strategy.fsdp_cpu_offload:
            yield f"fsdp_cpu_offload keeps actor and critic on the host: {name} has nothing to move. Drop --{name}."
    if all(of_critic.values()):
        yield "critic_cpu_offload keeps the critic on the host: offload_critic has nothing to move. Drop one of them."
    for name, is_set in of_critic.items():
        if is_set and not config.algorithm.trains_critic:
            estimator = config.algorithm.advantage_estimator
            yield f"{name} is about the critic: advantage_estimator={estimator} has none. Drop --{name}."


def _rows(config: Config, rows_of: Collection[str]) -> Iterator[str]:
    data = config.data
    if data.prompt_data is None and "prompt_data" not in rows_of:
        yield (
            "prompt_data names the prompts to train on: it is unset. Set --prompt_data, or give train_data to the "
            "trainer."
        )
    for name, path in (("prompt_data", data.prompt_data), ("eval_data", data.eval_data)):
        if path is not None and name in rows_of:
            yield f"{name} must be unset where the trainer is given rows: {name}={path}. Drop one of them."


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.prompt_data_probs is not None:
        try:
            num_sources = 0 if data.prompt_data is None else len(source_names(data.prompt_data))
            source_shares(data.prompt_data_probs, num_sources)
        except ValueError as error:
            yield str(error)
    if data.input_template is not None and data.apply_chat_template:
        yield (
            "input_template is for plain text, and apply_chat_template writes prompts itself: both are set. "
            "Drop --input_template or --apply_chat_template."
        )
    if data.input_template is not None and not _has_one_field(data.input_template):
        yield (
            f"input_template must have one {{}} for the prompt: {data.input_template!r}. "
            "Write other braces twice: {{ and }}."
        )
    if data.system_prompt is not None and not data.apply_chat_template:
        yield (
            "system_prompt is a message of the chat template: apply_chat_template=False. Add --apply_chat_template, or "
            "write the text into --input_template."
        )
    yield from _media(config)


def _media(config: Config) -> Iterator[str]:
    data = config.data
    low, high = data.image_min_pixels, data.image_max_pixels
    if low is not None and high is not None and low > high:
        yield (
            f"image_max_pixels must be at least image_min_pixels: image_max_pixels={high}, image_min_pixels={low}. "
            "Raise --image_max_pixels, or lower --image_min_pixels."
        )
    keys = {"image_key": data.image_key, "video_key": data.video_key, "audio_key": data.audio_key}
    keys |= {"input_key": data.input_key, "label_key": data.label_key, "reference_key": data.reference_key}
    for name in ("image_key", "video_key", "audio_key"):
        if same := [other for other, key in keys.items() if other != name and key == keys[name]]:
            yield f"{name} must name a column of its own: {name} and {same[0]} are {keys[name]!r}. Change --{name}."


def _has_one_field(template: str) -> bool:
    try:
        fields = [field for _, *field in string.Formatter().parse(template) if field[0] is not None]
    except ValueError:
        return False
    return fields == [["", "", None]]


def file_errors(config: Config) -> Iterator[str]:
    data = config.data
    texts = {"prompt_data": data.prompt_data, "eval_data": data.eval_data, "pretrain_data": data.pretrain_data}
    for name, text in texts.items():
        yield from source_errors(name, text)
    for name, path in (("save_path", config.train.save_path), ("ckpt_path", config.checkpoint.ckpt_path)):
        if path is None:
            continue
        place = Path(path).absolute()
        existing = next(path for path in (place, *place.parents) if path.exists())
        if not existing.is_dir():
            yield f"{name} must be a folder, or a place for a new one: {existing} is a file. Change --{name}."


def source_errors(name: str, text: str | None) -> Iterator[str]:
    """Files that a flag names and that are not there."""
    for source in [] if text is None else source_names(text):
        # Folders and hub ids are looked for where they are read, which is before any model as well.
        if not source or (Path(source).suffix.lower() in FILE_ENDINGS and not Path(source).exists()):
            yield f"{name} must name files, folders or hub ids: {source!r} is no file. Change --{name}."


def checkpoint_errors(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save_hf_ckpt and checkpoint.save_steps == -1 and checkpoint.ckpt_path is None:
        yield (
            "save_hf_ckpt writes a part of each checkpoint: save_steps=-1 and no ckpt_path save none. "
            "Set --save_steps, or drop --save_hf_ckpt."
        )


def report_errors(config: Config) -> Iterator[str]:
    report = config.report
    if report.use_wandb and importlib.util.find_spec("wandb") is None:
        yield (
            "use_wandb needs the package wandb, which is not installed. "
            "Run pip install 'lightrft[wandb]', or drop --use_wandb."
        )
    steps = {"profile_steps": report.profile_steps, "memory_snapshot_steps": report.memory_snapshot_steps}
    for name, text in steps.items():
        try:
            chosen_steps(text)
        except ValueError as error:
            yield f"{name}: {error} Write --{name} 3,4."


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
