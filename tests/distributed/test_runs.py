"""Whole runs: the same numbers whatever the layout of ranks and micro-batches, and what a run leaves behind."""

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrft.config import Config, dump_yaml
from lightrft.trainer import build_trainer
from tests import tiny_models
from tests.distributed.runs import make_config, read
from tests.distributed.torchrun import torchrun

TRAIN = Path(__file__).parents[2] / "examples" / "addition" / "train.py"


def run(config: Config) -> list[dict]:
    """What metrics.jsonl holds after a run on the ranks at hand."""
    build_trainer(config).fit()
    return read(config, "metrics.jsonl")


def responses(config: Config) -> list[tuple]:
    return [(r["step"], r["group"], r["index"], r["response"], r["reward"]) for r in read(config, "samples.jsonl")]


@pytest.mark.parametrize(
    ("estimator", "metrics"),
    [
        # The policy loss of normalised advantages is 0 at ratios of 1; that of GAE is not.
        ("group_norm", ["train/grad_norm", "train/entropy"]),
        ("gae", ["train/policy_loss", "train/value_loss", "train/grad_norm", "train/critic_grad_norm"]),
    ],
)
def test_one_rank_two_ranks_and_a_rollout_group_give_the_same_run(
    two_ranks, one_rank, task, tmp_path, estimator, metrics
):
    """DIST-03: keys belong to samples, so layouts draw the same tokens; losses and gradient norms agree to 1e-4."""
    algorithm = {"advantage_estimator": estimator}
    expected_config = make_config(task, tmp_path / "one", algorithm=algorithm)
    expected = one_rank.run(run, expected_config)[0][1]
    assert expected["reward/std"] > 0 and all(abs(expected[metric]) > 1e-3 for metric in metrics)
    for tp_size in (1, 2):
        rollout = {"engine_tp_size": tp_size}
        config = make_config(task, tmp_path / f"two{tp_size}", algorithm=algorithm, rollout=rollout)
        first = two_ranks.run(run, config)[0][1]
        assert responses(config) == responses(expected_config), tp_size
        for metric in (*metrics, "reward/mean", "rollout/response_length"):
            assert first[metric] == pytest.approx(expected[metric], rel=1e-4), (tp_size, metric)


def stepped_run(config: Config, micro_batch_sizes: list[int]) -> list[dict]:
    """Metrics of steps that have a micro-batch size each."""
    trainer = build_trainer(config)
    trainer.update_engine_weights()
    history = []
    for step, (rows, size) in enumerate(zip(trainer.sampler, micro_batch_sizes, strict=True), start=1):
        trainer.strategy.config = replace(config, train=replace(config.train, micro_train_batch_size=size))
        history.append(trainer.train_step(step, rows))
    trainer.writer.close()
    trainer.strategy.close()
    return history


def test_three_and_five_micro_batches_in_consecutive_steps_equal_one(two_ranks, task, tmp_path):
    """NUM-05: 10 prompts x 3 are 15 samples a rank: 3 forwards of 5, then 5 of 3, against 1 of 15 in both steps."""
    rollout = {"rollout_batch_size": 10, "n_samples_per_prompt": 3}
    train = {"train_batch_size": 30, "micro_train_batch_size": 15, "num_episodes": 2}
    algorithm = {"advantage_estimator": "gae"}
    histories = {}
    for name, sizes in (("whole", [15, 15]), ("split", [5, 3])):
        config = make_config(task, tmp_path / name, rollout=rollout, train=train, algorithm=algorithm)
        histories[name] = two_ranks.run(stepped_run, config, sizes)[0]
    assert [metrics["train/micro_batches"] for metrics in histories["whole"]] == [1, 1]
    assert [metrics["train/micro_batches"] for metrics in histories["split"]] == [3, 5]
    for whole, split in zip(histories["whole"], histories["split"], strict=True):
        for metric in ("train/policy_loss", "train/grad_norm", "train/entropy", "train/critic_grad_norm"):
            assert abs(whole[metric]) > 1e-3
            assert split[metric] == pytest.approx(whole[metric], rel=1e-4), metric


@pytest.mark.parametrize(("num_groups", "num_forwards"), [(1, 2), (3, 4)])
def test_groups_that_do_not_go_round_train_as_on_one_rank(
    two_ranks, one_rank, task, tmp_path, num_groups, num_forwards
):
    """A rank has a group of two samples less, in whose place it runs others for their collectives alone.

    Of one group it has none, so it runs a fixed sample; of three it has one, and runs the shorter sample again.
    """
    (tmp_path / "reward.py").write_text("def distinct(response):\n    return len(set(response))\n")
    owners = {
        "rollout": {"rollout_batch_size": num_groups, "n_samples_per_prompt": 2},
        "train": {"train_batch_size": 2 * num_groups, "micro_train_batch_size": 1, "max_steps": 3},
        "algorithm": {
            "advantage_estimator": "gae",
            "init_kl_coef": 0.1,
            "use_kl_loss": True,
            "kl_estimator": "k3",
        },
        "reward": {"reward_fn": f"{tmp_path}/reward.py:distinct"},
    }
    configs = [make_config(task, tmp_path / name, **owners) for name in ("one", "two")]
    ones, twos = one_rank.run(run, configs[0])[0], two_ranks.run(run, configs[1])[0]
    assert responses(configs[1]) == responses(configs[0])
    for one, two in zip(ones[1:], twos[1:], strict=True):
        assert (one["train/micro_batches"], two["train/micro_batches"]) == (2 * num_groups, num_forwards)
        assert one["train/grad_norm"] > 1e-3
        for metric in ("train/policy_loss", "train/value_loss", "train/grad_norm", "train/critic_grad_norm"):
            assert two[metric] == pytest.approx(one[metric], rel=1e-4), metric
        assert two["train/kl_loss"] == pytest.approx(one["train/kl_loss"], rel=1e-4, abs=1e-9)
    assert ones[3]["train/kl_loss"] > 0


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_before_the_first_update_ratios_are_exactly_one(two_ranks, task, tmp_path, temperature, packing):
    """NUM-01: ppo_kl is exactly 0, and the engine's log-probs equal the actor's to 1e-4."""
    config = make_config(
        task,
        tmp_path,
        rollout={"temperature": temperature},
        model={"packing": packing, "gradient_checkpointing": True},
        algorithm={"init_kl_coef": 0.1},
    )
    first = two_ranks.run(run, config)[0][1]
    assert first["train/ppo_kl"] == 0.0
    assert (first["train/clip_low"], first["train/clip_high"]) == (0.0, 0.0)
    assert first["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    assert 0 <= first["rollout/log_prob_mismatch"] < 1e-4


def test_engine_log_probs_stay_those_of_the_whole_vocabulary_under_top_p(two_ranks, task, tmp_path):
    """NUM-02"""
    config = make_config(task, tmp_path, rollout={"top_p": 0.5, "top_k": 5})
    assert two_ranks.run(run, config)[0][1]["rollout/log_prob_mismatch"] < 1e-4


def test_a_buffer_that_does_not_divide_trains_its_last_minibatch_with_its_own_divisor(two_ranks, task, tmp_path):
    """NUM-19: 10 samples by 4 are steps of 4, 4 and 2, and the schedule is as long as the run.

    The check at start refuses such numbers, so the trainer is assembled here without it.
    """
    lengths, schedule, left_over = two_ranks.run(ragged_run, make_config(task, tmp_path))[0]
    assert lengths == [4, 4, 2]
    assert schedule == 3
    assert left_over == []


def ragged_run(config: Config):
    from lightrft.trainer import SPMDPPOTrainer
    from lightrft.trainer.setup import check_inputs
    from lightrft.utils.means import Means

    rollout = {"rollout_batch_size": 5, "n_samples_per_prompt": 2}
    inputs = check_inputs(config)
    config = replace(
        config,
        rollout=replace(config.rollout, **rollout),
        train=replace(config.train, train_batch_size=4, max_steps=1, max_epochs=1),
    )
    inputs.strategy.config = config
    trainer = SPMDPPOTrainer(config, inputs=inputs)
    trainer.update_engine_weights()
    made = trainer.experience_maker.make_experience_list(trainer.share(trainer.prompts, range(5)), 1, 0.0, Means())
    trainer.replay_buffer.fill(made.experiences, made.plan)
    counts = trainer.strategy.collectives.all_gather_objects([len(part) for part, _ in trainer.minibatches(1)])
    trainer.ppo_train(1, Means())
    left_over = [name for name, p in trainer.actor.model.named_parameters() if p.grad is not None]
    steps = trainer.actor.scheduler.last_epoch
    trainer.strategy.close()
    return [sum(part) for part in zip(*counts, strict=True)], steps, left_over


@pytest.mark.parametrize(
    "evaluation",
    [{}, {"eval_steps": 1, "eval_n_samples_per_prompt": 4}, {"eval_steps": 1, "eval_temperature": 0.0}],
    ids=["start and end", "four samples each step", "greedy each step"],
)
def test_evaluation_changes_nothing_and_counts_each_prompt_once(two_ranks, task, tmp_path, evaluation):
    """5 prompts on 2 ranks; the training metrics with and without evaluation are bit-equal."""
    without = two_ranks.run(run, make_config(task, tmp_path / "without"))[0]
    data = {"eval_data": str(task / "prompts.jsonl"), "max_eval_samples": 5}
    config = make_config(task, tmp_path / "with", data=data, evaluation=evaluation)
    with_evaluation = two_ranks.run(run, config)[0]
    for step in (0, 2):
        rewards = [row["reward"] for row in read(config, "eval_samples.jsonl") if row["step"] == step]
        assert len(rewards) == 5 * evaluation.get("eval_n_samples_per_prompt", 1)
        assert with_evaluation[step]["eval/mean"] == pytest.approx(sum(rewards) / len(rewards))
    for step in (1, 2):
        own = {k: v for k, v in without[step].items() if not k.startswith(("time/", "sync/", "memory/", "tokens_per"))}
        assert {k: with_evaluation[step][k] for k in own} == own


def test_evaluation_of_fewer_prompts_than_ranks_counts_each_once(two_ranks, one_rank, task, tmp_path):
    """One prompt on two ranks: a rank has none, and the numbers are those of one rank."""
    data = {"eval_data": str(task / "prompts.jsonl"), "max_eval_samples": 1}
    one, two = (
        ranks.run(run, make_config(task, tmp_path / name, data=data))[0]
        for name, ranks in (("one", one_rank), ("two", two_ranks))
    )
    for step in (0, 2):
        evaluation = {name: value for name, value in two[step].items() if name.startswith("eval/")}
        faults = ("excluded", "failed", "ungradable")
        names = ("mean", "std", "accuracy", "pass@1", *faults, "response_length", "truncated")
        assert evaluation.keys() == {f"eval/{name}" for name in names}
        assert evaluation["eval/mean"] in (0.0, 1.0)
        assert evaluation == {name: one[step][name] for name in evaluation}


def test_ppo_trains_a_critic_with_every_option(two_ranks, task, tmp_path):
    config = make_config(
        task,
        tmp_path,
        algorithm={
            "advantage_estimator": "gae",
            "init_kl_coef": 0.05,
            "kl_target": 0.1,
            "advantages_norm": True,
            "truncation_bootstrap": True,
            "freezing_actor_steps": 1,
            "entropy_coef": 0.01,
        },
        strategy={"adam_offload": True},
        train={"train_batch_size": 8, "micro_train_batch_size": 2, "max_epochs": 2, "max_steps": 3},
    )
    history = two_ranks.run(run, config)[0]
    assert "train/policy_loss" not in history[1] and history[1]["train/value_loss"] > 0
    assert history[1]["train/critic_grad_norm"] > 0
    assert history[2]["train/grad_norm"] > 0
    assert history[3]["train/values"] != 0.0
    assert history[3]["kl/coefficient"] != history[1]["kl/coefficient"]


def test_kl_as_a_loss_pulls_towards_the_reference(two_ranks, task, tmp_path):
    """NUM-10: added in the loss form; taken off, it would push the policy away."""
    histories = {}
    for coefficient in (1e-9, 5.0):
        algorithm = {"init_kl_coef": coefficient, "use_kl_loss": True, "kl_estimator": "k3"}
        train = {"max_steps": 6, "num_episodes": 2}
        config = make_config(task, tmp_path / str(coefficient), algorithm=algorithm, train=train)
        histories[coefficient] = two_ranks.run(run, config)[0]
    free, held = histories[1e-9], histories[5.0]
    assert held[1]["train/kl_loss"] == pytest.approx(0.0, abs=1e-9)
    assert 0 < held[6]["train/kl_loss"] < free[6]["train/kl_loss"] / 2


RUN_METRICS = [
    "reward/mean",
    "reward/std",
    "train/policy_loss",
    "train/grad_norm",
    "train/ppo_kl",
    "train/clip_low",
    "train/clip_high",
    "train/entropy",
    "train/lr",
    "kl/reference",
    "rollout/response_length",
    "rollout/truncated",
    "rollout/zero_variance_groups",
    "rollout/log_prob_mismatch",
    "time/generate",
    "time/generate_waiting",
    "time/train",
    "time/sync",
    "sync/seconds",
    "sync/gib_per_second",
    "sync/verified_weights",
    "time/step",
    "memory/host_peak_gib",
    "tokens_per_second",
]


def test_the_run_folder_holds_what_the_readme_says(two_ranks, task, tmp_path):
    from lightrft.config import parse_config

    data = {"eval_data": str(task / "prompts.jsonl")}
    config = make_config(task, tmp_path / "run", data=data, algorithm={"init_kl_coef": 0.01})
    history = two_ranks.run(run, config)[0]
    folder = tmp_path / "run"
    assert [line["step"] for line in history] == [0, 1, 2]
    assert not [name for name in RUN_METRICS if name not in history[1]]
    assert parse_config(["--config", str(folder / "config.yaml")]) == config
    samples = read(config, "samples.jsonl")
    assert [(r["step"], r["group"], r["index"]) for r in samples] == [
        (step, group, index) for step in (1, 2) for group in range(4) for index in range(4)
    ]
    mean = sum(r["reward"] for r in samples[:16]) / 16
    assert history[1]["reward/mean"] == pytest.approx(mean)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["reward_before"] == history[0]["eval/mean"]
    assert summary["reward_after"] == history[2]["eval/mean"]
    assert summary["train_seconds"] > 0
    assert list((folder / "tensorboard").glob("events*"))


def test_two_ranks_under_torchrun_leave_one_run_folder_and_say_each_thing_once(task, tmp_path):
    """CLI-03: without a key, a network or standard input."""
    config = make_config(task, tmp_path / "runs" / "one")
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    ended = torchrun(TRAIN, "--config", str(tmp_path / "run.yaml"))
    assert (ended.returncode, ended.left) == (0, [])
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]
    names = ["config.yaml", "metrics.jsonl", "model", "reward.png", "samples.jsonl", "summary.json", "tensorboard"]
    assert sorted(path.name for path in (tmp_path / "runs" / "one").iterdir()) == names
    assert [line["step"] for line in read(config, "metrics.jsonl")] == [0, 1, 2]
    assert len(list((tmp_path / "runs" / "one" / "tensorboard").iterdir())) == 1
    for text in ("12 prompts in batches of 4", "step 1/2: ", "step 2/2: "):
        assert ended.output.count(text) == 1, text


def logged_run(config: Config) -> tuple[int, str]:
    """Optimizer steps of this rank, and what it logged."""
    with contextlib.redirect_stderr(io.StringIO()) as log:
        trainer = build_trainer(config)
        trainer.fit()
    return trainer.actor.scheduler.last_epoch, log.getvalue()


@pytest.mark.parametrize(
    ("tail", "steps", "rule"),
    [
        ("drop", 4, "2 steps per episode, 4 in all; tail_batch=drop: the last 1 of an episode's order are left out"),
        ("pad", 6, "3 steps per episode, 6 in all; tail_batch=pad: an episode's last batch takes 1 from the next"),
    ],
)
def test_two_episodes_of_five_prompts_take_equal_steps_on_both_ranks(two_ranks, task, tmp_path, tail, steps, rule):
    """DIST-05: batches of 2: 5 = 2 + 2 + 1, and the last one is left out or filled up."""
    config = make_config(
        task,
        tmp_path,
        data={"max_samples": 5, "tail_batch": tail},
        rollout={"rollout_batch_size": 2},
        train={"train_batch_size": 8, "num_episodes": 2, "max_steps": None},
    )
    (steps_of_0, log_of_0), (steps_of_1, log_of_1) = two_ranks.run(logged_run, config)
    assert (steps_of_0, steps_of_1) == (steps, steps)
    assert [line["step"] for line in read(config, "metrics.jsonl")] == list(range(steps + 1))
    assert log_of_0.count(f"5 prompts in batches of 2: {rule}") == 1
    assert "prompts in batches" not in log_of_1


def test_the_saved_model_is_the_trained_one(two_ranks, task, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = make_config(task, tmp_path / "run")
    two_ranks.run(run, config)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    start = AutoModelForCausalLM.from_pretrained(task / "model")
    moved = [not torch.equal(a, b) for a, b in zip(saved.parameters(), start.parameters(), strict=True)]
    assert all(moved)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").decode([4, 5]) == "23"


def whitened(task, save_path):
    from lightrft.rewards.records import RewardOutput
    from lightrft.trainer.rollouts import scored
    from lightrft.trainer.setup import assemble, check_inputs
    from lightrft.utils.means import Means

    algorithm = {"advantage_estimator": "gae", "advantages_norm": True}
    inputs = check_inputs(config := make_config(task, save_path, algorithm=algorithm))
    inputs.strategy.setup_distributed()
    maker = assemble(config, inputs).experience_maker
    rank = inputs.strategy.rank
    results = []
    for scores in ([[1.0, 2.0], [3.0]], [[1.0, 2.0, 3.0], []]):
        samples = [
            replace(scored(tiny_models.sample([3], [4], group=i), RewardOutput(score)), values=torch.zeros(1))
            for i, score in enumerate(scores[rank])
        ]
        made = maker.advantages.compute(samples, 0.0, Means())
        results.append([s.advantages.item() for s in made])
    inputs.strategy.close()
    return results


def test_advantages_are_whitened_over_the_tokens_of_all_ranks(two_ranks, task, tmp_path):
    """NUM-16: [1, 2] and [3]: mean 2, population deviation 0.8165; a rank without tokens still joins."""
    (first, every), (second, none) = two_ranks.run(whitened, task, tmp_path)
    assert first + second == pytest.approx([-1.2247, 0.0, 1.2247], abs=1e-4)
    assert every == pytest.approx(first + second) and none == []
