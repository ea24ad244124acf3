"""Settings that only another flag makes anything of: set alone they would change nothing, and nobody would say so."""

from collections.abc import Collection, Iterator, Mapping

from lightrft.config.arguments import Config, DataConfig, ModelConfig
from lightrft.config.flags import flag_values

READERS: Mapping[str, tuple[str, ...]] = {
    "use_fire": ("first_token_temperature",),
    "dynamic_sampling": ("dynamic_sampling_tries",),
    "pretrain_data": ("pretrain_split", "ptx_coef"),
    "eval_data": ("eval_steps", "eval_split", "eval_temperature", "eval_n_samples_per_prompt", "eval_pass_threshold"),
    "kl_target": ("kl_horizon",),
    "teacher_url": ("teacher_api", "teacher_timeout_seconds"),
    "remote_rm_url": ("remote_rm_batch_size", "remote_rm_timeout_seconds"),
    "judge_url": ("judge_model", "judge_prompt", "judge_pattern", "judge_range", "judge_timeout_seconds"),
    "overlong_buffer": ("overlong_buffer_len", "overlong_buffer_penalty_factor"),
    "reward_running_norm": ("reward_running_norm_minus_mean",),
}
"""By flag, the settings of it. Those that command lines carry along for runs of several kinds, such as the rate of a
critic or the names of Weights & Biases, are not among them."""


def unread_setting_errors(config: Config, rows_of: Collection[str]) -> Iterator[str]:
    """Settings that differ from their defaults while the flag that reads them is off.

    Args:
        rows_of: Data that the caller has itself, as `check_config`.
    """
    values, defaults = flag_values(config), flag_values(Config(ModelConfig(""), DataConfig()))
    for reader, settings in READERS.items():
        if values[reader] or reader in rows_of:
            continue
        for name in settings:
            if values[name] != defaults[name]:
                yield (
                    f"{name} is a setting of {reader}: {name}={values[name]}, and {reader} is unset. "
                    f"Set --{reader}, or drop --{name}."
                )
