"""Evaluation in whole runs: when, on what, and what it leaves the engine in."""

import json
from collections import Counter
from itertools import combinations

import pytest

from lightrft.config import Config
from lightrft.strategy.engine import EngineState
from lightrft.trainer import build_trainer
from tests.distributed.runs import make_config, read


def watched_run(config: Config) -> tuple[list[dict], int | None, EngineState]:
    """metrics.jsonl, how many syncs the run took, and the state in which it left the engine."""
    trainer = build_trainer(config)
    trainer.fit()
    engine = trainer.strategy.engine
    assert engine is not None
    return read(config, "metrics.jsonl"), engine.weight_version, engine.state


def training_metrics(line: dict) -> dict:
    other = ("eval/", "time/", "sync/", "memory/", "tokens_per")
    return {name: value for name, value in line.items() if not name.startswith(other)}


def passing(group: list[dict], k: int) -> float:
    """pass@k by definition: the share of subsets with a response of reward 1."""
    subsets = list(combinations([row["reward"] >= 1 for row in group], k))
    return sum(map(any, subsets)) / len(subsets)


def test_each_evaluation_counts_five_prompts_of_two_ranks_once(two_ranks, task, tmp_path):
    data = {"eval_data": str(task / "prompts.jsonl"), "max_eval_samples": 5}
    evaluation = {"eval_steps": 2, "eval_n_samples_per_prompt": 4}
    config = make_config(task, tmp_path / "run", data=data, evaluation=evaluation, train={"max_steps": 3})
    history, *_ = two_ranks.run(watched_run, config)[0]
    assert ["eval/mean" in line for line in history] == [True, False, True, True]
    samples = read(config, "eval_samples.jsonl")
    assert [(row["step"], row["group"], row["index"]) for row in samples] == [
        (step, group, index) for step in (0, 2, 3) for group in range(5) for index in range(4)
    ]
    assert not [row for row in samples if "advantage" in row]
    for step in (0, 2, 3):
        line = history[step]
        groups = [[r for r in samples if (r["step"], r["group"]) == (step, group)] for group in range(5)]
        rows = [row for group in groups for row in group]
        assert line["eval/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 20)
        assert line["eval/accuracy"] == pytest.approx(sum(row["reward/accuracy"] for row in rows) / 20)
        assert line["eval/truncated"] == pytest.approx(sum(row["finish_reason"] == "length" for row in rows) / 20)
        assert line["eval/response_length"] == pytest.approx(sum(row["num_response_tokens"] for row in rows) / 20)
        assert line["eval/excluded"] == 0
        for k in (1, 2, 4):
            assert line[f"eval/pass@{k}"] == pytest.approx(sum(passing(group, k) for group in groups) / 5)
        votes = [Counter(row["response"].strip() for row in group).most_common(1)[0][0] for group in groups]
        winners = [
            next(r for r in group if r["response"].strip() == vote) for group, vote in zip(groups, votes, strict=True)
        ]
        assert line["eval/maj@4"] == pytest.approx(sum(row["reward"] for row in winners) / 5)
    assert 0 < history[0]["eval/pass@1"] < history[0]["eval/pass@4"] < 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    rewards = {step: history[step]["eval/mean"] for step in (0, 2, 3)}
    assert summary["reward_before"] == rewards[0] and summary["reward_after"] == rewards[3]
    assert summary["pass@4_after"] == history[3]["eval/pass@4"]
    assert summary["reward_best"] == max(rewards.values()) == rewards[summary["best_step"]]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_rank_without_a_prompt_takes_part_in_an_evaluation(two_ranks, task, tmp_path, tp_size):
    data = {"eval_data": str(task / "prompts.jsonl"), "max_eval_samples": 1}
    owners = {"rollout": {"engine_tp_size": tp_size}, "evaluation": {"eval_n_samples_per_prompt": 4}}
    config = make_config(task, tmp_path / "run", data=data, train={"max_steps": 1}, **owners)
    history, *_ = two_ranks.run(watched_run, config)[0]
    samples = [row for row in read(config, "eval_samples.jsonl") if row["step"] == 0]
    assert [(row["group"], row["index"]) for row in samples] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert history[0]["eval/mean"] == pytest.approx(sum(row["reward"] for row in samples) / 4)


@pytest.mark.parametrize(("sleeps", "syncs", "syncs_without"), [(True, 6, 4), (False, 4, 4)])
def test_the_next_rollout_has_the_weights_of_the_update_before_an_evaluation(
    two_ranks, task, tmp_path, sleeps, syncs, syncs_without
):
    """WGT-03: with sleep on, an evaluation drops the weights, and the rollout after it costs one sync more.

    Three steps take a sync at the start and one after each update, 4; evaluations at steps 0 and 2 come before a
    rollout, and the one at step 3 before none, so 4 + 2. The metrics of every step are bit-equal without evaluation.
    """
    data = {"eval_data": str(task / "prompts.jsonl"), "max_eval_samples": 3}
    owners = {"rollout": {"enable_engine_sleep": sleeps}, "train": {"max_steps": 3}}
    with_evaluation = make_config(task, tmp_path / "with", data=data, evaluation={"eval_steps": 2}, **owners)
    without = make_config(task, tmp_path / "without", **owners)
    history, versions, state = two_ranks.run(watched_run, with_evaluation)[0]
    expected, expected_versions, _ = two_ranks.run(watched_run, without)[0]
    assert (versions, expected_versions) == (syncs, syncs_without)
    assert state is (EngineState.DROPPED if sleeps else EngineState.AWAKE)
    assert expected[3]["train/grad_norm"] > 0
    assert [training_metrics(line) for line in history] == [training_metrics(line) for line in expected]


def test_greedy_evaluation_gives_every_sample_of_a_prompt_the_same_response(two_ranks, task, tmp_path):
    """The responses of training at temperature 1 differ."""
    data = {"eval_data": str(task / "prompts.jsonl"), "max_eval_samples": 3}
    evaluation = {"eval_temperature": 0.0, "eval_n_samples_per_prompt": 3}
    config = make_config(task, tmp_path, data=data, evaluation=evaluation, train={"max_steps": 1})
    [line, _], *_ = two_ranks.run(watched_run, config)[0]
    responses = {group: set() for group in range(3)}
    for row in read(config, "eval_samples.jsonl"):
        if row["step"] == 0:
            responses[row["group"]].add(row["response"])
    assert [len(texts) for texts in responses.values()] == [1, 1, 1]
    assert line["eval/pass@1"] == line["eval/pass@2"] == line["eval/pass@3"] == line["eval/maj@3"] == line["eval/mean"]
    assert len({row["response"] for row in read(config, "samples.jsonl")}) > 4


def test_the_pass_threshold_is_inclusive(two_ranks, task, tmp_path):
    """Every response is worth 0.5."""
    (tmp_path / "reward.py").write_text("def half(response):\n    return 0.5\n")
    data = {"eval_data": str(task / "prompts.jsonl"), "max_eval_samples": 2}
    for threshold, expected in ((0.5, 1.0), (0.6, 0.0)):
        config = make_config(
            task,
            tmp_path / str(threshold),
            data=data,
            evaluation={"eval_pass_threshold": threshold},
            train={"max_steps": 1},
            reward={"reward_fn": f"{tmp_path}/reward.py:half"},
        )
        [line, _], *_ = two_ranks.run(watched_run, config)[0]
        assert (line["eval/mean"], line["eval/pass@1"]) == (0.5, expected)
        assert "eval/maj@1" not in line


@pytest.mark.parametrize("with_tokens", [True, False])
def test_samples_have_their_advantage_always_and_their_tokens_on_demand(two_ranks, task, tmp_path, with_tokens):
    """GRPO's advantage is the same for each token of a response: 0 in a group of equal rewards."""
    config = make_config(
        task,
        tmp_path,
        data={"eval_data": str(task / "prompts.jsonl"), "max_eval_samples": 2},
        algorithm={"init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k3"},
        report={"save_token_log_probs": with_tokens},
        train={"max_steps": 1},
    )
    two_ranks.run(watched_run, config)
    samples = read(config, "samples.jsonl")
    for group in range(4):
        rows = [row for row in samples if row["group"] == group]
        rewards = [row["reward"] for row in rows]
        mean = sum(rewards) / 4
        deviation = (sum((reward - mean) ** 2 for reward in rewards) / 3) ** 0.5
        expected = [(reward - mean) / deviation if deviation else 0.0 for reward in rewards]
        assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-4)
    for row in [*samples, *read(config, "eval_samples.jsonl")]:
        lengths = {name: len(values) for name, values in row.items() if name.endswith("_log_probs")}
        roles = ("rollout", "action", "base_action") if "advantage" in row else ("rollout",)
        expected_lengths = {f"{role}_log_probs": row["num_response_tokens"] for role in roles}
        assert lengths == (expected_lengths if with_tokens else {})
        assert ("response_ids" in row, "prompt_ids" in row) == (with_tokens, with_tokens)
    if with_tokens:
        assert samples[0]["action_log_probs"] == pytest.approx(samples[0]["base_action_log_probs"], abs=1e-5)
        assert samples[0]["action_log_probs"] == pytest.approx(samples[0]["rollout_log_probs"], abs=1e-4)


def test_a_resumed_run_keeps_its_first_and_best_evaluation_and_draws_the_whole_curve(two_ranks, task, tmp_path):
    """CKPT-03: 2 + 2 steps are evaluated as 4 are."""
    data = {"eval_data": str(task / "prompts.jsonl"), "max_eval_samples": 5}
    owners = {"data": data, "evaluation": {"eval_steps": 1, "eval_n_samples_per_prompt": 2}}
    parts = {"max_steps": 2, "num_episodes": 2}
    straight = make_config(task, tmp_path / "straight", **owners, train=parts | {"max_steps": 4})
    two_ranks.run(watched_run, straight)
    for max_steps in (2, 4):
        checkpoint = {"save_steps": 2, "load_checkpoint": max_steps == 4}
        train = parts | {"max_steps": max_steps}
        resumed = make_config(task, tmp_path / "resumed", **owners, train=train, checkpoint=checkpoint)
        two_ranks.run(watched_run, resumed)
    expected = json.loads((tmp_path / "straight" / "summary.json").read_text())
    found = json.loads((tmp_path / "resumed" / "summary.json").read_text())
    names = [name for name in expected if name not in ("train_seconds", "steps")]
    assert {"reward_before", "reward_after", "reward_best", "best_step", "pass@2_after", "maj@2_before"} <= set(names)
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names})
    for name in ("eval_samples.jsonl", "samples.jsonl"):
        rows = [[(row["step"], row["response"]) for row in read(config, name)] for config in (straight, resumed)]
        assert rows[0] == rows[1]
