"""Runs with every estimator, loss, correction and shaping of rewards: the same on one rank and on two."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrft.config import Config
from lightrft.config.arguments import ADVANTAGE_NAMES, POLICY_LOSS_NAMES
from lightrft.ops.aggregation import AGGREGATIONS
from lightrft.ops.corrections import CORRECTIONS
from lightrft.trainer import build_trainer
from lightrft.trainer.setup import check_inputs
from tests import tiny_models
from tests.distributed.runs import make_config, read
from tests.http_servers import TeacherAnswers, serving

SEVERAL_UPDATES = {"train_batch_size": 8, "max_epochs": 2}
"""Four optimizer steps a rollout: the policy moves away from the one that sampled."""


def run(config: Config) -> list[dict]:
    build_trainer(config).fit()
    return read(config, "metrics.jsonl")


def responses(config: Config) -> list[tuple]:
    return [(r["step"], r["group"], r["index"], r["response"], r["reward"]) for r in read(config, "samples.jsonl")]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another random model with the task's tokenizer."""
    return str(tiny_models.save_model(tmp_path_factory.mktemp("teacher") / "model", seed=7))


FAMILIES = {
    "samples of a prompt, ratios of samples": {
        "algorithm": {"advantage_estimator": "rloo", "policy_loss": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
        "train": SEVERAL_UPDATES,
    },
    "whitened over all ranks": {
        "algorithm": {"advantage_estimator": "reinforce++", "init_kl_coef": 0.1, "advantage_clip": 1.5},
        "reward": {"reward_running_norm": True, "reward_running_norm_minus_mean": True, "reward_clip": 2.0},
    },
    "a greedy response as the baseline": {"algorithm": {"advantage_estimator": "remax", "rollout_correction": "tis"}},
    "a critic and a second clip": {
        "algorithm": {"advantage_estimator": "gae", "dual_clip": 1.01, "loss_agg_mode": "seq-mean-token-sum-norm"},
        "train": SEVERAL_UPDATES,
    },
    "DAPO": {
        "algorithm": {"advantage_estimator": "group_norm", "eps_clip_high": 0.28, "overlong_filter": True},
        "rollout": {"dynamic_sampling": True, "n_samples_per_prompt": 2, "stop": ("5", "6", "7")},
        "train": {"train_batch_size": 8},
        "reward": {"overlong_buffer": True, "overlong_buffer_len": 3},
    },
    "few tokens, old log-probs of the engine": {
        "algorithm": {"advantage_estimator": "reinforce_baseline", "policy_loss": "cispo", "old_log_probs": "engine"},
        "train": SEVERAL_UPDATES,
    },
    "a hot first token": {
        "rollout": {"use_fire": True},
        "algorithm": {"policy_loss": "gmpo", "eps_clip": 0.4},
        "train": SEVERAL_UPDATES,
    },
    "tokens of high entropy": {
        "algorithm": {
            "advantage_estimator": "group_norm",
            "high_entropy_token_ratio": 0.3,
            "loss_agg_mode": "seq-mean-token-mean",
        },
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_and_two_ranks_give_the_same_run(two_ranks, one_rank, task, tmp_path, family):
    """NUM-05, NUM-06, NUM-16: samples are the same, metrics and gradients agree to 1e-4."""
    configs = [make_config(task, tmp_path / name, **FAMILIES[family]) for name in ("one", "two")]
    ones, twos = one_rank.run(run, configs[0])[0], two_ranks.run(run, configs[1])[0]
    assert responses(configs[1])[:16] == responses(configs[0])[:16]
    compared = [
        name for name in ones[1] if not name.startswith(("time/", "sync/", "memory/", "tokens_per", "train/micro"))
    ]
    assert ones[1]["train/grad_norm"] > 0 and twos[1].keys() == ones[1].keys()
    for name in compared:
        assert math.isfinite(ones[1][name])
        assert twos[1][name] == pytest.approx(ones[1][name], rel=1e-3, abs=1e-5), name


def single(task: Path, tmp_path: Path, **owners: dict) -> Config:
    return make_config(task, tmp_path / "run", **{"train": SEVERAL_UPDATES | {"max_steps": 1}, **owners})


@pytest.mark.parametrize("estimator", ADVANTAGE_NAMES)
def test_every_estimator_trains(one_rank, task, teacher, tmp_path, estimator):
    model = {"teacher_pretrain": teacher} if estimator == "on_policy_distillation" else {}
    step = one_rank.run(run, single(task, tmp_path, algorithm={"advantage_estimator": estimator}, model=model))[0][1]
    assert step["train/grad_norm"] > 0 and step["train/skipped_steps"] == 0


def test_a_teacher_draws_the_policy_to_itself_whatever_the_reward(two_ranks, task, teacher, tmp_path):
    config = make_config(
        task,
        tmp_path / "run",
        model={"teacher_pretrain": teacher},
        algorithm={"advantage_estimator": "on_policy_distillation", "policy_loss": "policy_gradient"},
        optimizer={"actor_learning_rate": 1e-2},
        rollout={"n_samples_per_prompt": 16},
        train={"max_steps": 30, "num_episodes": 10, "train_batch_size": 64, "micro_train_batch_size": 32},
    )
    steps = two_ranks.run(run, config)[0][1:]
    divergences = [step["kl/teacher"] for step in steps]
    assert sum(divergences[-5:]) < 0.5 * sum(divergences[:5])


@pytest.mark.parametrize("api", ["openai", "sglang"])
def test_a_teacher_behind_a_server_gives_the_run_of_the_local_one(two_ranks, task, teacher, tmp_path, api):
    """Over two steps, beside a reward and with the greedy responses of ReMax, which no teacher scores."""
    answers = TeacherAnswers(AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32))
    with serving(answers) as server:
        teachers = {"local": {"teacher_pretrain": teacher}, api: {"teacher_url": server.url, "teacher_api": api}}
        configs = [
            make_config(task, tmp_path / name, model=model, algorithm={"advantage_estimator": "remax"})
            for name, model in teachers.items()
        ]
        local, remote = (two_ranks.run(run, config)[0][1:] for config in configs)
        # Two steps of 4 prompts x 4 samples, and one question of each rank at the start.
        assert len(server.requests) == 2 * 16 + 2
    assert responses(configs[1]) == responses(configs[0])
    for one, other in zip(local, remote, strict=True):
        for name in ("kl/teacher", "train/policy_loss", "train/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-5), name
    assert abs(local[0]["kl/teacher"]) > 0.1


def test_a_loss_on_texts_is_mixed_in_and_falls(two_ranks, one_rank, task, tmp_path):
    """Three texts, of which two ranks have 2 and 1: the same on one rank and on two."""
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"input": t}) + "\n" for t in ("1+1=2", "2+2=4", "3+3=6")))
    (tmp_path / "reward.py").write_text("def always(response):\n    return 1.0\n")
    owners = {
        "data": {"pretrain_data": str(tmp_path / "texts.jsonl")},
        "algorithm": {"ptx_coef": 0.5},
        "reward": {"reward_fn": f"{tmp_path}/reward.py:always"},
        "train": {"max_steps": 3},
    }
    configs = [make_config(task, tmp_path / name, **owners) for name in ("one", "two")]
    ones, twos = one_rank.run(run, configs[0])[0][1:], two_ranks.run(run, configs[1])[0][1:]
    assert ones[0]["train/ptx_loss"] > ones[1]["train/ptx_loss"] > ones[2]["train/ptx_loss"]
    for one, two in zip(ones, twos, strict=True):
        for name in ("train/ptx_loss", "train/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-4) and one[name] > 0


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_gives_the_numbers_of_fsdp2_with_texts_a_teacher_and_sample_means(
    two_ranks, task, teacher, tmp_path, stage
):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"input": t}) + "\n" for t in ("1+1=2", "2+2=4", "3+3=6")))
    owners = {
        "model": {"teacher_pretrain": teacher},
        "data": {"pretrain_data": str(tmp_path / "texts.jsonl")},
        "algorithm": {"policy_loss": "gspo", "high_entropy_token_ratio": 0.5},
        "train": SEVERAL_UPDATES,
    }
    backends = {"fsdp2": {"fsdp": True}, "zero": {"fsdp": False, "zero_stage": stage}}
    configs = [make_config(task, tmp_path / name, strategy=flags, **owners) for name, flags in backends.items()]
    fsdp2, zero = (two_ranks.run(run, config)[0][1] for config in configs)
    for name in ("train/ptx_loss", "train/grad_norm", "train/policy_loss", "train/ppo_kl", "kl/teacher"):
        assert zero[name] == pytest.approx(fsdp2[name], rel=1e-3, abs=1e-6), name


def with_another_token(task: Path, folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    tokenizer.add_tokens(["<x>"])
    tiny_models.save_model(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_teacher_with_another_tokenizer_is_refused(task, tmp_path):
    teacher = with_another_token(task, tmp_path / "other")
    with pytest.raises(ValueError, match=r"^the teacher must have the actor's tokenizer: the vocabulary of .*other is"):
        check_inputs(make_config(task, tmp_path / "run", model={"teacher_pretrain": teacher}))


@pytest.mark.parametrize("loss", POLICY_LOSS_NAMES)
def test_every_policy_loss_trains(one_rank, task, tmp_path, loss):
    step = one_rank.run(run, single(task, tmp_path, algorithm={"policy_loss": loss}))[0][1]
    assert step["train/grad_norm"] > 0 and step["train/skipped_steps"] == 0
    assert ("train/clip_high" in step) == (loss not in ("sapo", "policy_gradient"))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_every_aggregation_trains(one_rank, task, tmp_path, mode):
    step = one_rank.run(run, single(task, tmp_path, algorithm={"loss_agg_mode": mode}))[0][1]
    assert step["train/grad_norm"] > 0 and step["train/skipped_steps"] == 0


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction_is_near_one_with_the_built_in_engine(one_rank, task, tmp_path, correction):
    step = one_rank.run(run, single(task, tmp_path, algorithm={"rollout_correction": correction}))[0][1]
    assert step["correction/weight"] == pytest.approx(1.0, abs=1e-3) and step["correction/masked"] == 0


def test_the_ratio_of_high_entropy_tokens_is_that_of_the_flag(one_rank, task, tmp_path):
    step = one_rank.run(run, single(task, tmp_path, algorithm={"high_entropy_token_ratio": 0.25}))[0][1]
    tokens = 16 * step["rollout/response_length"]
    assert step["advantages/selected"] * tokens == pytest.approx(round(0.25 * tokens), abs=1.001)


@pytest.mark.parametrize("num_tries", [1, 3])
def test_constant_rewards_end_dynamic_sampling_after_its_tries(two_ranks, task, tmp_path, num_tries):
    """RWD-08: nothing is kept, groups of equal rewards fill the batch, and the same tries on both ranks."""
    (tmp_path / "reward.py").write_text("def always(response):\n    return 1.0\n")
    config = make_config(
        task,
        tmp_path / "run",
        rollout={"dynamic_sampling": True, "dynamic_sampling_tries": num_tries},
        train={"max_steps": 1},
        reward={"reward_fn": f"{tmp_path}/reward.py:always"},
    )
    step = two_ranks.run(run, config)[0][1]
    counts = {name: step[f"dynamic_sampling/{name}"] for name in ("tries", "drawn", "kept", "filled")}
    # 12 prompts in batches of 4.
    assert counts == {"tries": num_tries, "drawn": 4 * num_tries, "kept": 0, "filled": 4}
    assert len(responses(config)) == 16 and step["rollout/zero_variance_groups"] == 1


def test_dynamic_sampling_ends_with_the_data(one_rank, task, tmp_path):
    (tmp_path / "reward.py").write_text("def always(response):\n    return 1.0\n")
    rollout = {"dynamic_sampling": True, "dynamic_sampling_tries": 9}
    reward = {"reward_fn": f"{tmp_path}/reward.py:always"}
    step = one_rank.run(run, single(task, tmp_path, rollout=rollout, reward=reward))[0][1]
    assert (step["dynamic_sampling/tries"], step["dynamic_sampling/drawn"]) == (3, 12)


REWARD = """
def graded(response, label):
    return float(label) + len(set(response)) / 10
"""


def test_kept_rewards_texts_and_labels_stay_together(two_ranks, task, tmp_path):
    """RWD-08: the reward is made of label and response, and is that of the same line in samples.jsonl."""
    (tmp_path / "reward.py").write_text(REWARD)
    config = make_config(
        task,
        tmp_path / "run",
        rollout={"dynamic_sampling": True, "n_samples_per_prompt": 2, "rollout_batch_size": 6},
        train={"max_steps": 1, "train_batch_size": 12, "micro_train_batch_size": 2},
        reward={"reward_fn": f"{tmp_path}/reward.py:graded"},
    )
    step = two_ranks.run(run, config)[0][1]
    assert step["dynamic_sampling/kept"] > 0
    labels = {row["input"]: row["label"] for row in map(json.loads, (task / "prompts.jsonl").read_text().splitlines())}
    lines = read(config, "samples.jsonl")
    assert len(lines) == 12
    for line in lines:
        assert line["reward"] == pytest.approx(float(labels[line["prompt"]]) + len(set(line["response"])) / 10)


def resumed_moments(config: Config) -> tuple[list, list]:
    """Moments at the end of a run, and those with which another goes on from its checkpoint."""
    trainer = build_trainer(config)
    trainer.fit()
    ended = list(trainer.experience_maker.advantages.shaping.moments)
    resumed = replace(config, checkpoint=replace(config.checkpoint, load_checkpoint=True))
    trainer = build_trainer(replace(resumed, train=replace(resumed.train, max_steps=3)))
    trainer.start()
    begun = list(trainer.experience_maker.advantages.shaping.moments)
    trainer.writer.close()
    trainer.strategy.close()
    return ended, begun


def test_reward_moments_are_in_the_checkpoint_and_untouched_by_evaluation(two_ranks, task, tmp_path):
    config = make_config(
        task,
        tmp_path / "run",
        data={"eval_data": str(task / "prompts.jsonl")},
        evaluation={"eval_steps": 1},
        reward={"reward_running_norm": True},
        checkpoint={"save_steps": 1},
    )
    (ended, begun), other = two_ranks.run(resumed_moments, config)
    assert ended == begun and other == (ended, begun)
    # Two steps of 4 prompts x 4 samples, and none of evaluation's.
    assert ended[2] == 32
