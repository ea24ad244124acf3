"""The trainer as a Python object: functions and rows instead of flags, callbacks, and the user's own algorithm."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightrft.config import Config, parse_config
from lightrft.rewards.builtin import contains_answer
from lightrft.strategy.utils.collectives import PhaseError
from lightrft.trainer import Callback, SPMDPPOTrainer, SPMDPPOTrainerVL, build_trainer
from lightrft.trainer.setup import check_inputs
from tests.distributed.runs import make_config, read

ALGORITHM = """
import os

import torch

from lightrft.ops.advantages import group_norm_advantages
from lightrft.ops.losses import PolicyLoss, ppo_clip

calls = 0


def advantages(inputs):
    return group_norm_advantages(inputs)


def policy_loss(inputs):
    return ppo_clip(inputs)


def unclipped(inputs):
    assert inputs.rollout_log_probs is not None and sum(inputs.lengths) == len(inputs.log_probs)
    return PolicyLoss(-torch.exp(inputs.log_probs - inputs.old_log_probs) * inputs.advantages)


def fails_once(inputs):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1":
        raise RuntimeError("the loss broke")
    return ppo_clip(inputs)
"""


@pytest.fixture(scope="module")
def algorithm(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("algorithm") / "mine.py"
    path.write_text(ALGORITHM)
    return str(path)


def rows(task: Path) -> list[dict]:
    return [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]


def without_files(config: Config, **owners: dict) -> Config:
    config = replace(config, data=replace(config.data, prompt_data=None, eval_data=None))
    return replace(config, **{name: replace(getattr(config, name), **changes) for name, changes in owners.items()})


def measured(config: Config) -> list[dict]:
    """What metrics.jsonl holds, but for times and memory."""
    others = ("time/", "sync/", "memory/", "tokens_per")
    return [{k: v for k, v in line.items() if not k.startswith(others)} for line in read(config, "metrics.jsonl")]


def run(config: Config) -> list[dict]:
    build_trainer(config).fit()
    return measured(config)


def run_on_rows(config: Config, task: Path) -> list[dict]:
    from datasets import Dataset

    table = Dataset.from_list(rows(task))
    trainer = SPMDPPOTrainerVL(config, reward_fn=contains_answer, train_data=table, eval_data=rows(task)[:5])
    trainer.fit()
    return measured(config)


def test_rows_and_a_function_make_the_run_that_files_and_flags_make(two_ranks, task, tmp_path):
    data = {"eval_data": str(task / "prompts.jsonl"), "max_eval_samples": 5}
    config = make_config(task, tmp_path / "files", data=data)
    expected = two_ranks.run(run, config)[0]
    own = without_files(config, train={"save_path": str(tmp_path / "rows")}, reward={"reward_fn": "exact_match"})
    assert two_ranks.run(run_on_rows, own, task)[0] == expected
    assert expected[2]["train/grad_norm"] > 0
    written = parse_config(["--config", str(tmp_path / "rows" / "config.yaml")])
    assert written == replace(own, reward=replace(own.reward, reward_fn="lightrft.rewards.builtin:contains_answer"))


def test_files_and_rows_at_once_are_refused(task, tmp_path):
    with pytest.raises(ValueError, match="prompt_data must be unset where the trainer is given rows"):
        SPMDPPOTrainer(make_config(task, tmp_path), train_data=rows(task))


def test_a_row_that_lacks_the_label_is_named_with_its_argument(task, tmp_path):
    with pytest.raises(ValueError, match=r"train_data, row 1: no key 'label': it has input\."):
        SPMDPPOTrainer(without_files(make_config(task, tmp_path)), train_data=[rows(task)[0], {"input": "1+1="}])


@pytest.mark.parametrize("data", ["prompts.jsonl", {"input": ["1+1="], "label": ["2"]}, 5])
def test_data_that_is_no_rows_is_refused_with_what_rows_are(data, task, tmp_path):
    message = (
        f"train_data must be rows, such as a list of dicts: got {type(data).__name__}. Files are for --prompt_data."
    )
    with pytest.raises(ValueError) as caught:
        SPMDPPOTrainer(without_files(make_config(task, tmp_path)), train_data=data)
    assert str(caught.value) == message


def test_a_reward_given_by_name_is_refused_with_where_names_go(task, tmp_path):
    with pytest.raises(ValueError, match=r"got 'exact_match'\. Names are for --reward_fn\."):
        SPMDPPOTrainer(make_config(task, tmp_path), reward_fn="exact_match")


@pytest.mark.parametrize(
    ("callbacks", "got"),
    [
        (Callback(), "Callback"),
        (None, "NoneType"),
        ([Callback], "a list with type"),
        ([Callback(), print], "a list with builtin_function_or_method"),
    ],
)
def test_callbacks_that_cannot_be_called_are_refused_before_anything_loads(callbacks, got, task, tmp_path):
    with pytest.raises(ValueError) as caught:
        SPMDPPOTrainer(make_config(task, tmp_path, model={"pretrain": "gone"}), callbacks=callbacks)
    assert str(caught.value) == (
        f"callbacks must be a list of objects of subclasses of Callback: got {got}. Write callbacks=[MyCallback()]."
    )


def fit_twice(config: Config) -> str:
    trainer = build_trainer(config)
    trainer.fit()
    with pytest.raises(ValueError) as caught:
        trainer.fit()
    return str(caught.value)


def test_a_trainer_that_has_run_says_so(two_ranks, task, tmp_path):
    message = "a trainer runs once, and this one has run. Make another."
    assert two_ranks.run(fit_twice, make_config(task, tmp_path)) == [message, message]


def checked_on_other_rows(config: Config, task: Path, name: str) -> str:
    import torch.distributed as dist

    turned = rows(task)[dist.get_rank() :] + rows(task)[: dist.get_rank()]
    with pytest.raises(ValueError) as caught:
        check_inputs(config, **{"train_data": rows(task), name: turned})
    return str(caught.value)


@pytest.mark.parametrize("name", ["train_data", "eval_data"])
def test_ranks_with_other_prompts_than_rank_0_end_the_run_at_its_start(two_ranks, task, tmp_path, name):
    message = (
        "every rank must have the same prompts in the same order: rank 1 and rank 0 differ. "
        "Seed what shuffles the data, and compare the files of the nodes."
    )
    config = without_files(make_config(task, tmp_path))
    assert two_ranks.run(checked_on_other_rows, config, task, name) == [message, message]


class Notes(Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_train_begin(self, trainer):
        self.events.append(f"begin {trainer.step}")

    def on_evaluate(self, trainer, step, metrics):
        self.events.append(f"evaluate {step}: {sorted(metrics)[0]}")

    def on_step_end(self, trainer, step, metrics):
        assert metrics["train/grad_norm"] >= 0
        self.events.append(f"step {step}")

    def on_checkpoint(self, trainer, step):
        self.events.append(f"checkpoint {step}")

    def on_train_end(self, trainer, summary):
        self.events.append(f"end {summary['steps']}")


class Stop(Callback):
    def on_step_end(self, trainer, step, metrics):
        trainer.should_stop = trainer.strategy.rank == 1 and step == 2


class Fail(Callback):
    def on_step_end(self, trainer, step, metrics):
        if trainer.strategy.rank == 1:
            raise RuntimeError("the callback broke")


def noted(config: Config, *others: Callback) -> list[str]:
    notes = Notes()
    SPMDPPOTrainer(config, callbacks=[notes, *others]).fit()
    return notes.events


def test_callbacks_are_told_on_every_rank_in_the_order_of_the_run(two_ranks, task, tmp_path):
    """The run that goes on evaluates nothing at its start."""
    owners = {"data": {"eval_data": str(task / "prompts.jsonl")}, "checkpoint": {"save_steps": 2}}
    first = ["begin 0", "evaluate 0: eval/accuracy", "step 1", "step 2", "checkpoint 2"]
    first += ["evaluate 3: eval/accuracy", "step 3", "checkpoint 3", "end 3"]
    config = make_config(task, tmp_path, train={"max_steps": 3}, **owners)
    assert two_ranks.run(noted, config) == [first, first]
    again = make_config(task, tmp_path, train={"max_steps": 4, "num_episodes": 2}, **owners)
    again = replace(again, checkpoint=replace(again.checkpoint, load_checkpoint=True))
    then = ["begin 3", "evaluate 4: eval/accuracy", "step 4", "checkpoint 4", "end 4"]
    assert two_ranks.run(noted, again) == [then, then]


def test_a_callback_on_one_rank_ends_the_run_for_all_after_the_step(two_ranks, task, tmp_path):
    """The last step has its checkpoint, and the model is written as at any end."""
    config = make_config(task, tmp_path, train={"max_steps": 3}, checkpoint={"save_steps": 10})
    events = ["begin 0", "step 1", "step 2", "checkpoint 2", "end 2"]
    assert two_ranks.run(noted, config, Stop()) == [events, events]
    assert (tmp_path / "model" / "config.json").is_file()
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


def failed_run(config: Config, *callbacks: Callback) -> str:
    trainer = SPMDPPOTrainer(config, callbacks=callbacks)
    with pytest.raises(PhaseError) as caught:
        trainer.fit()
    trainer.strategy.close()
    return str(caught.value)


def test_a_callback_that_fails_on_one_rank_ends_all_with_its_traceback(two_ranks, task, tmp_path):
    for message in two_ranks.run(failed_run, make_config(task, tmp_path), Fail()):
        assert message.startswith("callbacks failed on rank 1 of 2.")
        assert 'in on_step_end\n    raise RuntimeError("the callback broke")' in message


def test_a_users_estimator_and_loss_make_the_run_of_the_built_in_ones(two_ranks, task, tmp_path, algorithm):
    """Two updates a step, so that ratios move; the same functions by another way, so the same bits."""
    train = {"train_batch_size": 8, "micro_train_batch_size": 2}
    expected = two_ranks.run(run, make_config(task, tmp_path / "built_in", train=train))[0]
    own = {"advantage_estimator": f"{algorithm}:advantages", "policy_loss": f"{algorithm}:policy_loss"}
    assert two_ranks.run(run, make_config(task, tmp_path / "own", train=train, algorithm=own))[0] == expected
    assert expected[1]["train/grad_norm"] > 0 and expected[1]["train/ppo_kl"] != 0


def test_a_users_loss_without_clipping_reports_none(two_ranks, task, tmp_path, algorithm):
    config = make_config(task, tmp_path, algorithm={"policy_loss": f"{algorithm}:unclipped"})
    first = two_ranks.run(run, config)[0][1]
    assert first["train/grad_norm"] > 0
    assert not {"train/clip_low", "train/clip_high"} & first.keys()


def test_a_users_loss_that_fails_on_one_rank_ends_all_with_its_traceback(two_ranks, task, tmp_path, algorithm):
    """In the third of a step's four forwards, after which the other rank would wait in its backward pass."""
    owners = {"algorithm": {"policy_loss": f"{algorithm}:fails_once"}, "train": {"micro_train_batch_size": 2}}
    for message in two_ranks.run(failed_run, make_config(task, tmp_path, **owners)):
        assert message.startswith("policy loss failed on rank 1 of 2.")
        assert 'in fails_once\n    raise RuntimeError("the loss broke")' in message
