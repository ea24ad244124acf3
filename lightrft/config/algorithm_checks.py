"""Checks of the algorithm's flags: what contradicts, and what would be read nowhere."""

from collections.abc import Iterator
from dataclasses import asdict

from lightrft.config.arguments import (
    CLIPPING_LOSSES,
    GROUP_ESTIMATORS,
    AlgorithmConfig,
    Config,
)
from lightrft.config.functions import is_function_spec
from lightrft.config.sources import is_server_url, server_urls, shown_url

SETTINGS_OF_LOSSES = {
    "eps_clip_high": ("ppo_clip", "gspo", "gmpo", "cpgd", "cispo"),
    "dual_clip": CLIPPING_LOSSES,
    "policy_drift_coef": ("cpgd",),
    "sapo_tau_pos": ("sapo",),
    "sapo_tau_neg": ("sapo",),
}
"""Flags that only some built-in policy losses read; a user's own may read any."""


def algorithm_errors(config: Config) -> Iterator[str]:
    """What is wrong with estimator, loss, corrections and shaping of rewards."""
    yield from _kl(config.algorithm)
    yield from _estimator(config)
    yield from _teacher(config)
    yield from _loss(config.algorithm)
    yield from _corrections(config)
    yield from _rewards(config)


def _kl(algorithm: AlgorithmConfig) -> Iterator[str]:
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


def _estimator(config: Config) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    estimator = algorithm.advantage_estimator
    if estimator in GROUP_ESTIMATORS and rollout.n_samples_per_prompt == 1:
        yield (
            f"{estimator} compares the samples of a prompt: n_samples_per_prompt=1 makes every advantage 0. "
            "Set --n_samples_per_prompt to 2 or more."
        )
    if rollout.dynamic_sampling and rollout.n_samples_per_prompt == 1:
        yield (
            "dynamic_sampling keeps prompts whose samples have different rewards: n_samples_per_prompt=1 keeps none. "
            "Set --n_samples_per_prompt to 2 or more, or drop --dynamic_sampling."
        )
    if rollout.use_fire and rollout.engine_type != "torch":
        yield (
            f"use_fire draws one token at another temperature, which only the torch engine does: engine_type="
            f"{rollout.engine_type}. Set --engine_type torch, or drop --use_fire."
        )
    if algorithm.trains_critic:
        return
    without_critic = f"advantage_estimator={estimator} has none. Drop the flag, or set --advantage_estimator gae."
    if algorithm.freezing_actor_steps > 0:
        yield f"freezing_actor_steps={algorithm.freezing_actor_steps} trains only the critic: {without_critic}"
    if algorithm.truncation_bootstrap:
        yield f"truncation_bootstrap needs a critic: {without_critic}"
    if config.model.critic_pretrain is not None:
        yield f"critic_pretrain={config.model.critic_pretrain} needs a critic: {without_critic}"


def _teacher(config: Config) -> Iterator[str]:
    model, algorithm = config.model, config.algorithm
    yield from _teacher_server(config)
    if model.has_teacher:
        return
    unset = "teacher_pretrain and teacher_url are unset. Set --teacher_pretrain or --teacher_url"
    if algorithm.advantage_estimator == "on_policy_distillation":
        yield f"on_policy_distillation learns from a teacher: {unset}."
    if algorithm.opd_kl_coef != AlgorithmConfig().opd_kl_coef:
        yield (
            f"opd_kl_coef weighs the divergence from a teacher: opd_kl_coef={algorithm.opd_kl_coef}, and "
            f"{unset}, or drop --opd_kl_coef."
        )


def _teacher_server(config: Config) -> Iterator[str]:
    model = config.model
    if model.teacher_url is None:
        return
    if model.teacher_pretrain is not None:
        yield (
            f"there is one teacher: teacher_pretrain={model.teacher_pretrain} and teacher_url are both set. "
            "Drop one of them."
        )
    for url in server_urls(model.teacher_url):
        if not is_server_url(url) or url.endswith("/v1"):
            yield (
                "teacher_url must be as http://host:port, without login, query or /v1 (a key goes into "
                f"LIGHTRFT_TEACHER_API_KEY): {shown_url(url)!r}. Change --teacher_url."
            )
    if config.rollout.temperature != 1:
        yield (
            "servers give log-probs at temperature 1, and the actor's are those of the policy that samples: "
            f"temperature={config.rollout.temperature}. Set --temperature 1, or take --teacher_pretrain."
        )


def _loss(algorithm: AlgorithmConfig) -> Iterator[str]:
    loss = algorithm.policy_loss
    if is_function_spec(loss):
        return
    values, defaults = asdict(algorithm), asdict(AlgorithmConfig())
    for name, readers in SETTINGS_OF_LOSSES.items():
        if values[name] != defaults[name] and loss not in readers:
            yield (
                f"{name} is a setting of {_listed(readers)}: {name}={values[name]}, and policy_loss={loss} does not "
                f"read it. Set --policy_loss to {_listed(readers, 'or')}, or drop --{name}."
            )


def _corrections(config: Config) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    correction = algorithm.rollout_correction
    users = {"old_log_probs engine": algorithm.old_log_probs == "engine", "rollout_correction": correction != "none"}
    for user, is_on in users.items():
        if is_on and (rollout.top_p < 1 or rollout.top_k > 0):
            yield (
                f"--{user} takes the engine's log-probs, which must be of the whole vocabulary: top_p={rollout.top_p}, "
                f"top_k={rollout.top_k}. Set --top_p 1 and --top_k 0, or drop it."
            )
    if all(users.values()):
        yield (
            f"rollout_correction weighs the actor's log-probs against the engine's: rollout_correction={correction}, "
            "and old_log_probs=engine has no others. Drop one of them."
        )
    if algorithm.old_log_probs == "engine" and algorithm.high_entropy_token_ratio > 0:
        yield (
            f"high_entropy_token_ratio reads the entropies of the actor's forward: high_entropy_token_ratio="
            f"{algorithm.high_entropy_token_ratio}, and old_log_probs=engine makes none. Drop one of them."
        )
    defaults = AlgorithmConfig()
    if algorithm.correction_high != defaults.correction_high and correction == "none":
        yield (
            f"correction_high is a setting of rollout_correction: correction_high={algorithm.correction_high}, and "
            "rollout_correction=none. Set --rollout_correction, or drop --correction_high."
        )
    if algorithm.correction_low != defaults.correction_low and correction != "icepop":
        yield (
            f"correction_low is a setting of icepop: correction_low={algorithm.correction_low}, and "
            f"rollout_correction={correction}. Set --rollout_correction icepop, or drop --correction_low."
        )


def _rewards(config: Config) -> Iterator[str]:
    reward, longest = config.reward, config.rollout.generate_max_len
    if reward.overlong_buffer and reward.overlong_buffer_len > longest:
        yield (
            f"overlong_buffer_len must be at most generate_max_len: {reward.overlong_buffer_len} > {longest}. "
            "Set --overlong_buffer_len, or drop --overlong_buffer."
        )


def _listed(names: tuple[str, ...], word: str = "and") -> str:
    """`a, b and c`"""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last
