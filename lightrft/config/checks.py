"""Checks across flags, all made before anything is loaded."""

import importlib.util
import math
import string
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lightrft.config.arguments import REWARD_NAMES, Config
from lightrft.config.flags import flag_values
from lightrft.config.sources import FILE_ENDINGS, source_names, source_shares
from lightrft.config.steps import chosen_steps

Range = tuple[str, Callable[[Any], bool]]

AT_LEAST_1: Range = ("at least 1", lambda value: value >= 1)
AT_LEAST_0: Range = ("at least 0", lambda value: value >= 0)
ABOVE_0: Range = ("above 0", lambda value: value > 0)
ABOVE_0_TO_1: Range = ("above 0 and at most 1", lambda value: 0 < value <= 1)
FROM_0_TO_1: Range = ("from 0 to 1", lambda value: 0 <= value <= 1)

RANGES: dict[str, Range] = {
    "chunk_size": AT_LEAST_1,
    "prompt_max_len": AT_LEAST_1,
    "max_samples": AT_LEAST_1,
    "max_eval_samples": AT_LEAST_1,
    "engine_tp_size": AT_LEAST_1,
    "engine_mem_util": ABOVE_0_TO_1,
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


def check_config(config: Config, world_size: int, local_world_size: int | None = None) -> None:
    """Refuses settings that cannot work, before models, data or process groups exist.

    Args:
        config: All flags.
        world_size: Ranks of the run.
        local_world_size: Those on this node; None means that all are.

    Raises:
        ValueError: some rule is broken; one line for each, `rule: values. remedy.`
    """
    errors = list(range_errors(config))
    # The arithmetic below divides by sizes that these have to be right for.
    if not errors:
        errors += [*_rollout_groups(config, world_size, local_world_size), *_batch_arithmetic(config, world_size)]
    errors += [*_algorithm(config), *_strategy(config), *_data(config), *_files(config)]
    errors += [*_checkpoint(config), *_evaluation(config), *_report(config), *_reward(config)]
    if errors:
        raise ValueError("\n".join(errors))


def tp_size_error(world_size: int, tp_size: int) -> str | None:
    """What is wrong where `tp_size` does not divide the ranks into groups."""
    if tp_size >= 1 and world_size % tp_size == 0:
        return None
    return (
        f"WORLD_SIZE must be a multiple of engine_tp_size: {world_size} ranks, engine_tp_size={tp_size}. "
        f"Set --engine_tp_size to {_alternatives(_divisors(world_size))}."
    )


def nearest_multiples(value: int, multiple: int) -> tuple[int | None, int]:
    """Largest positive multiple below `value`, or None, and the smallest above; `value` is no multiple itself."""
    below = value // multiple * multiple
    return below or None, below + multiple


def range_errors(config: Config) -> Iterator[str]:
    """Flags whose value alone is wrong: what follows from them cannot be computed."""
    for name, value in flag_values(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{name} must be finite: {name}={value}. Change --{name}."
        elif value is not None and name in RANGES and not RANGES[name][1](value):
            yield f"{name} must be {RANGES[name][0]}: {name}={value}. Change --{name}."


def _rollout_groups(config: Config, world_size: int, local_world_size: int | None) -> Iterator[str]:
    tp_size = config.rollout.engine_tp_size
    if error := tp_size_error(world_size, tp_size):
        yield error
    elif local_world_size is not None and local_world_size % tp_size:
        fitting = _divisors(math.gcd(world_size, local_world_size))
        yield (
            f"A rollout group must lie inside one node, so LOCAL_WORLD_SIZE must be a multiple of engine_tp_size: "
            f"{local_world_size} of {world_size} ranks on this node, engine_tp_size={tp_size}. "
            f"Set --engine_tp_size to {_alternatives(fitting)}."
        )


def _batch_arithmetic(config: Config, world_size: int) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    per_forward = 1 if train.max_tokens_per_micro_batch else train.micro_train_batch_size * world_size
    if train.train_batch_size % per_forward:
        yield (
            f"train_batch_size must be a multiple of micro_train_batch_size x ranks: {train.train_batch_size}, "
            f"{train.micro_train_batch_size} x {world_size} ranks = {per_forward}. "
            f"Set --train_batch_size to {_alternatives(nearest_multiples(train.train_batch_size, per_forward))}."
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
    remedy = f"Set --rollout_batch_size to {_alternatives(prompts)}"
    fitting = [size for size in _divisors(num_prompts * num_samples) if size % per_forward == 0]
    below = max((size for size in fitting if size < batch_size), default=None)
    above = min((size for size in fitting if size > batch_size), default=None)
    return f"{remedy}, or --train_batch_size to {_alternatives((below, above))}" if fitting else remedy


def _algorithm(config: Config) -> Iterator[str]:
    algorithm, num_samples = config.algorithm, config.rollout.n_samples_per_prompt
    if algorithm.use_kl_loss and algorithm.kl_estimator == "k1" and algorithm.init_kl_coef > 0:
        yield (
            "use_kl_loss needs an estimator whose gradient is that of the KL divergence: kl_estimator=k1 has an "
            "expected gradient of 0. Set --kl_estimator to k2 or k3."
        )
    if algorithm.kl_target is not None and algorithm.init_kl_coef == 0:
        yield (
            f"kl_target steers a KL coefficient above 0: kl_target={algorithm.kl_target}, init_kl_coef=0. "
            "Set --init_kl_coef, or drop --kl_target."
        )
    if algorithm.advantage_estimator == "gae":
        return
    if num_samples == 1:
        yield (
            "group_norm compares the samples of a prompt: n_samples_per_prompt=1 makes every advantage 0. "
            "Set --n_samples_per_prompt to 2 or more."
        )
    without_critic = "advantage_estimator=group_norm has none. Drop the flag, or set --advantage_estimator gae."
    if algorithm.freezing_actor_steps > 0:
        yield f"freezing_actor_steps={algorithm.freezing_actor_steps} trains only the critic: {without_critic}"
    if algorithm.truncation_bootstrap:
        yield f"truncation_bootstrap needs a critic: {without_critic}"
    if config.model.critic_pretrain is not None:
        yield f"critic_pretrain={config.model.critic_pretrain} needs a critic: {without_critic}"


def _strategy(config: Config) -> Iterator[str]:
    strategy = config.strategy
    if strategy.fsdp_cpu_offload and strategy.adam_offload:
        yield (
            "fsdp_cpu_offload keeps the optimizer state on the host already: adam_offload has nothing to move. "
            "Drop --adam_offload."
        )
    if strategy.fsdp_cpu_offload and not strategy.fsdp:
        yield "fsdp_cpu_offload is a setting of FSDP2: fsdp=False. Add --fsdp, or drop --fsdp_cpu_offload."


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.prompt_data_probs is not None:
        try:
            source_shares(data.prompt_data_probs, len(source_names(data.prompt_data)))
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


def _has_one_field(template: str) -> bool:
    try:
        fields = [field for _, *field in string.Formatter().parse(template) if field[0] is not None]
    except ValueError:
        return False
    return fields == [["", "", None]]


def _files(config: Config) -> Iterator[str]:
    for name, text in (("prompt_data", config.data.prompt_data), ("eval_data", config.data.eval_data)):
        for source in [] if text is None else source_names(text):
            # Folders and hub ids are looked for where they are read, which is before any model as well.
            if not source or (Path(source).suffix.lower() in FILE_ENDINGS and not Path(source).exists()):
                yield f"{name} must name files, folders or hub ids: {source!r} is no file. Change --{name}."
    for name, path in (("save_path", config.train.save_path), ("ckpt_path", config.checkpoint.ckpt_path)):
        if path is None:
            continue
        place = Path(path).absolute()
        existing = next(path for path in (place, *place.parents) if path.exists())
        if not existing.is_dir():
            yield f"{name} must be a folder, or a place for a new one: {existing} is a file. Change --{name}."


def _checkpoint(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.save_hf_ckpt and checkpoint.save_steps == -1 and checkpoint.ckpt_path is None:
        yield (
            "save_hf_ckpt writes a part of each checkpoint: save_steps=-1 and no ckpt_path save none. "
            "Set --save_steps, or drop --save_hf_ckpt."
        )


def _evaluation(config: Config) -> Iterator[str]:
    if config.evaluation.eval_steps > 0 and config.data.eval_data is None:
        yield (
            f"eval_steps evaluates on eval_data: eval_steps={config.evaluation.eval_steps}, and eval_data is unset. "
            "Set --eval_data, or drop --eval_steps."
        )


def _report(config: Config) -> Iterator[str]:
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


def _reward(config: Config) -> Iterator[str]:
    spec = config.reward.reward_fn
    module, colon, function = spec.rpartition(":")
    if not colon and spec not in REWARD_NAMES:
        yield (
            f"reward_fn must be a built-in reward or module:function: reward_fn={spec}. "
            f"Set --reward_fn to {_alternatives(REWARD_NAMES)}, or to module:function."
        )
    if colon and not (module and function.isidentifier()):
        yield (
            f"reward_fn must name a module and a function: reward_fn={spec}. "
            "Set --reward_fn to module:function or path/to/file.py:function."
        )
    if colon and module.endswith(".py") and not Path(module).is_file():
        yield f"reward_fn must name an existing file: {module} is no file. Change --reward_fn."


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _alternatives(choices: Iterable[object]) -> str:
    """`1, 2 or 3`; None is no choice."""
    *others, last = [str(choice) for choice in choices if choice is not None]
    return f"{', '.join(others)} or {last}" if others else last
