"""Ranks whose flags or files differ, as those of nodes do whose command lines were typed one by one."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from lightrft.config import Config
from lightrft.config.preference import RewardModelConfig, parse_reward_model_config
from lightrft.strategy.strategy import get_strategy
from lightrft.trainer.agreement import check_same_flags
from lightrft.trainer.reward_model_setup import check_pair_inputs
from lightrft.trainer.setup import check_inputs
from tests import tiny_models
from tests.distributed.runs import make_config

END = "Start all nodes by one command line or configuration file."


def changed(config: Config, **owners: dict) -> Config:
    return replace(config, **{owner: replace(getattr(config, owner), **change) for owner, change in owners.items()})


def refusal(*configs: Config | RewardModelConfig) -> str | None:
    """What a rank is told whose configuration is that of its number."""
    own = configs[dist.get_rank()]
    try:
        (check_inputs if isinstance(own, Config) else check_pair_inputs)(own)  # type: ignore[operator]
    except ValueError as error:
        return str(error)
    return None


def refusal_of_flags(*configs: Config) -> str | None:
    own = configs[dist.get_rank()]
    try:
        check_same_flags(get_strategy(own).process_groups, own)
    except ValueError as error:
        return str(error)
    return None


def test_other_flags_end_all_ranks_before_anything_is_written(two_ranks, task, tmp_path) -> None:
    """Rollout groups of other sizes would wait for each other."""
    config = make_config(task, tmp_path / "run")
    other = changed(config, rollout={"engine_tp_size": 2})
    message = f"every rank must have the same flags: --engine_tp_size is 1 on rank 0 and 2 on rank 1. {END}"
    assert two_ranks.run(refusal, config, other) == [message, message]
    assert not (tmp_path / "run").exists()


def test_an_error_shows_five_flags_at_most(two_ranks, task, tmp_path) -> None:
    config = make_config(task, tmp_path)
    algorithm = {"eps_clip": 0.3, "value_clip": 0.3, "dual_clip": 3.0, "gamma": 0.5, "lambd": 0.5}
    other = changed(config, algorithm=algorithm, train={"seed": 1, "max_epochs": 3})
    [message, _] = two_ranks.run(refusal_of_flags, config, other)
    assert message.count(" on rank 0 and ") == 5 and ", and 2 others differ. " in message


@pytest.mark.parametrize(
    "owner, first, second",
    [
        ("model", {"pretrain": "/here/model"}, {"pretrain": "/there/model"}),
        ("data", {"media_workers": 1}, {"media_workers": 8}),
        ("report", {"use_wandb": True}, {"use_wandb": False}),
        ("reward", {"reward_fn": "/here/own.py:score"}, {"reward_fn": "/there/own.py:score"}),
        ("reward", {"reward_pretrain": '{"a": "/here/m"}'}, {"reward_pretrain": '{"a": "/there/m"}'}),
        ("algorithm", {"policy_loss": "own.py:loss"}, {"policy_loss": "there/own.py:loss"}),
    ],
)
def test_a_node_may_have_its_own_places_and_workers(two_ranks, task, tmp_path, owner, first, second) -> None:
    config = make_config(task, tmp_path)
    ends = two_ranks.run(refusal_of_flags, changed(config, **{owner: first}), changed(config, **{owner: second}))
    assert ends == [None, None]


@pytest.mark.parametrize(
    "owner, change",
    [
        ("model", {"teacher_pretrain": "a"}),
        ("data", {"pretrain_data": "a"}),
        ("reward", {"remote_rm_url": "http://a"}),
        ("reward", {"reward_fn": "last_number"}),
        ("reward", {"reward_fn": "/here/own.py:other"}),
    ],
)
def test_what_one_rank_alone_has_or_names_is_refused(two_ranks, task, tmp_path, owner, change) -> None:
    """The others would wait for its role, or train on another reward."""
    config = changed(make_config(task, tmp_path), reward={"reward_fn": "/here/own.py:score"})
    for message in two_ranks.run(refusal_of_flags, config, changed(config, **{owner: change})):
        assert message is not None and f"--{next(iter(change))} is " in message


def test_other_models_in_the_same_place_are_refused(two_ranks, task, tmp_path) -> None:
    other = tiny_models.save_model(tmp_path / "other", tiny_models.qwen2(intermediate_size=96))
    config = make_config(task, tmp_path / "run")
    for message in two_ranks.run(refusal, config, changed(config, model={"pretrain": other})):
        assert message is not None
        assert message.startswith("every rank must have the same models: rank 1 and rank 0 differ. ")


def test_a_reward_model_s_own_flags_are_compared(two_ranks, task) -> None:
    flags = ["--pretrain", str(task / "model"), "--train_data", "unused", "--fsdp"]
    first, second = (parse_reward_model_config([*flags, "--max_len", length]) for length in ("64", "32"))
    message = f"every rank must have the same flags: --max_len is 64 on rank 0 and 32 on rank 1. {END}"
    assert two_ranks.run(refusal, first, second) == [message, message]
