"""Flags of the algorithm that contradict each other are refused with the reason."""

from typing import get_args

import pytest
import torch

from lightrft.config import check_config
from lightrft.config.algorithm_checks import SETTINGS_OF_LOSSES
from lightrft.config.arguments import (
    ADVANTAGE_NAMES,
    GROUP_ESTIMATORS,
    POLICY_LOSS_NAMES,
    SAMPLE_LOSSES,
    WHITENED_ESTIMATORS,
    LossAggMode,
    RolloutCorrection,
)
from lightrft.ops.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from lightrft.ops.aggregation import AGGREGATIONS
from lightrft.ops.corrections import CORRECTIONS
from tests.config.test_checks import changed, config, errors

__all__ = ["config"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"advantage_estimator": "rloo", "n_samples_per_prompt": 1, "train_batch_size": 32},
            "rloo compares the samples of a prompt: n_samples_per_prompt=1 makes every advantage 0. "
            "Set --n_samples_per_prompt to 2 or more.",
        ),
        (
            {"dynamic_sampling": True, "n_samples_per_prompt": 1, "train_batch_size": 32},
            "dynamic_sampling keeps prompts whose samples have different rewards: n_samples_per_prompt=1 keeps none. "
            "Set --n_samples_per_prompt to 2 or more, or drop --dynamic_sampling.",
        ),
        ({"dual_clip": 1.0}, "dual_clip must be above 1: dual_clip=1.0. Change --dual_clip."),
        (
            {"dual_clip": 3.0, "policy_loss": "cispo"},
            "dual_clip is a setting of ppo_clip and gspo: dual_clip=3.0, and policy_loss=cispo does not read it. "
            "Set --policy_loss to ppo_clip or gspo, or drop --dual_clip.",
        ),
        (
            {"policy_drift_coef": 0.1},
            "policy_drift_coef is a setting of cpgd: policy_drift_coef=0.1, and policy_loss=ppo_clip does not read it. "
            "Set --policy_loss to cpgd, or drop --policy_drift_coef.",
        ),
        (
            {"eps_clip_high": 0.3, "policy_loss": "sapo"},
            "eps_clip_high is a setting of ppo_clip, gspo, gmpo, cpgd and cispo: eps_clip_high=0.3, and "
            "policy_loss=sapo does not read it. Set --policy_loss to ppo_clip, gspo, gmpo, cpgd or cispo, or drop "
            "--eps_clip_high.",
        ),
        (
            {"advantage_estimator": "on_policy_distillation"},
            "on_policy_distillation learns from a teacher: teacher_pretrain and teacher_url are unset. "
            "Set --teacher_pretrain or --teacher_url.",
        ),
        (
            {"opd_kl_coef": 0.5},
            "opd_kl_coef weighs the divergence from a teacher: opd_kl_coef=0.5, and teacher_pretrain and teacher_url "
            "are unset. Set --teacher_pretrain or --teacher_url, or drop --opd_kl_coef.",
        ),
        (
            {"teacher_url": "http://a:8000", "teacher_pretrain": "teacher"},
            "there is one teacher: teacher_pretrain=teacher and teacher_url are both set. Drop one of them.",
        ),
        (
            {"teacher_url": "http://a:8000", "temperature": 0.7},
            "servers give log-probs at temperature 1, and the actor's are those of the policy that samples: "
            "temperature=0.7. Set --temperature 1, or take --teacher_pretrain.",
        ),
        (
            {"teacher_api": "sglang"},
            "teacher_api is a setting of teacher_url: teacher_api=sglang, and teacher_url is unset. "
            "Set --teacher_url, or drop --teacher_api.",
        ),
        ({"eps_clip_high": -0.1}, "eps_clip_high must be above 0: eps_clip_high=-0.1. Change --eps_clip_high."),
        (
            {"rollout_correction": "icepop", "correction_low": 2.0},
            "correction_low must be from 0 to 1: correction_low=2.0. Change --correction_low.",
        ),
        (
            {"rollout_correction": "icepop", "correction_high": 0.5},
            "correction_high must be at least 1: correction_high=0.5. Change --correction_high.",
        ),
        (
            {"old_log_probs": "engine", "top_p": 0.9},
            "--old_log_probs engine takes the engine's log-probs, which must be of the whole vocabulary: top_p=0.9, "
            "top_k=0. Set --top_p 1 and --top_k 0, or drop it.",
        ),
        (
            {"rollout_correction": "tis", "top_k": 20},
            "--rollout_correction takes the engine's log-probs, which must be of the whole vocabulary: top_p=1.0, "
            "top_k=20. Set --top_p 1 and --top_k 0, or drop it.",
        ),
        (
            {"old_log_probs": "engine", "rollout_correction": "mis"},
            "rollout_correction weighs the actor's log-probs against the engine's: rollout_correction=mis, and "
            "old_log_probs=engine has no others. Drop one of them.",
        ),
        (
            {"old_log_probs": "engine", "high_entropy_token_ratio": 0.2},
            "high_entropy_token_ratio reads the entropies of the actor's forward: high_entropy_token_ratio=0.2, and "
            "old_log_probs=engine makes none. Drop one of them.",
        ),
        (
            {"correction_high": 5.0},
            "correction_high is a setting of rollout_correction: correction_high=5.0, and rollout_correction=none. "
            "Set --rollout_correction, or drop --correction_high.",
        ),
        (
            {"rollout_correction": "tis", "correction_low": 0.1},
            "correction_low is a setting of icepop: correction_low=0.1, and rollout_correction=tis. "
            "Set --rollout_correction icepop, or drop --correction_low.",
        ),
        (
            {"overlong_buffer": True, "generate_max_len": 64},
            "overlong_buffer_len must be at most generate_max_len: 1024 > 64. "
            "Set --overlong_buffer_len, or drop --overlong_buffer.",
        ),
        (
            {"reward_running_norm_minus_mean": True},
            "reward_running_norm_minus_mean is a setting of reward_running_norm: reward_running_norm_minus_mean=True, "
            "and reward_running_norm is unset. Set --reward_running_norm, or drop --reward_running_norm_minus_mean.",
        ),
    ],
)
def test_contradictions_are_refused_with_the_reason(flags, message, config):
    """NUM-02, NUM-18."""
    assert errors(config, **flags) == [message]


@pytest.mark.parametrize("url", ["http://a:8000", "https://a.b/teacher/", "http://a:1,http://[::1]:2, http://c"])
def test_servers_of_a_teacher_are_scheme_host_and_port(url, config):
    check_config(changed(config, teacher_url=url, advantage_estimator="on_policy_distillation"), 1)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("a:8000", "a:8000"),
        ("http://a:8000,", ""),
        ("ftp://a", "ftp://a"),
        ("http://:8000", "http://:8000"),
        ("http://a:port", "http://a:port"),
        ("http://a/v1/", "http://a/v1"),
        ("http://a/?key=s3cret", "http://a/"),
        ("http://me:s3cret@a:8000", "a:8000"),
        ("http://me:s3?cret@a:8000", "..."),
    ],
)
def test_other_urls_are_refused_without_showing_a_login_or_a_query(url, shown, config):
    assert errors(config, teacher_url=url) == [
        "teacher_url must be as http://host:port, without login, query or /v1 (a key goes into "
        f"LIGHTRFT_TEACHER_API_KEY): {shown!r}. Change --teacher_url."
    ]


def test_a_hot_first_token_is_refused_on_other_engines(config):
    assert (
        "use_fire draws one token at another temperature, which only the torch engine does: engine_type=vllm. "
        "Set --engine_type torch, or drop --use_fire."
    ) in errors(config, use_fire=True, engine_type="vllm")


def test_a_users_loss_may_read_every_setting(config):
    settings = {"eps_clip_high": 0.3, "dual_clip": 3.0, "policy_drift_coef": 0.1, "sapo_tau_pos": 2.0}
    check_config(changed(config, policy_loss="my:f", **settings), 1)


def test_names_in_the_config_are_those_of_the_functions_behind_them():
    assert get_args(LossAggMode) == tuple(AGGREGATIONS)
    assert get_args(RolloutCorrection) == ("none", *CORRECTIONS)
    assert {*GROUP_ESTIMATORS, *WHITENED_ESTIMATORS} <= set(ADVANTAGE_NAMES)
    readers = {loss for losses in SETTINGS_OF_LOSSES.values() for loss in losses}
    assert readers | set(SAMPLE_LOSSES) <= set(POLICY_LOSS_NAMES)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGE_NAMES) - {"gae", "on_policy_distillation"}))
def test_estimators_that_compare_samples_are_those_to_which_a_single_one_teaches_nothing(name):
    alone = AdvantageInputs(
        scores=torch.tensor([2.0]),
        groups=torch.tensor([0]),
        valid=torch.tensor([True]),
        action_mask=torch.tensor([True]),
        lengths=[1],
        kl=None,
        kl_coef=0.0,
        values=None,
        bootstrap_values=None,
        gamma=1.0,
        lambd=1.0,
        greedy_scores=torch.tensor([1.0]),
    )
    advantages, _ = ADVANTAGE_ESTIMATORS[name](alone)
    assert (advantages.item() == 0) == (name in GROUP_ESTIMATORS)
