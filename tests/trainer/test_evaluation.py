"""What an evaluation makes of the responses to one prompt, and of several evaluations."""

from dataclasses import replace

import pytest

from lightrft.rewards.records import RewardOutput
from lightrft.trainer.evaluation import add_group_means
from lightrft.trainer.rollouts import scored
from lightrft.utils.means import Means, merged_means
from tests.tiny_models import sample


def group_metrics(*judged: tuple[str, float | None], num_samples: int = 4, threshold: float = 1.0) -> dict[str, float]:
    means = Means()
    group = [scored(replace(sample([3], [4]), response=response), RewardOutput(reward)) for response, reward in judged]
    add_group_means(means, group, num_samples, threshold)
    return merged_means([means.sums])


def test_the_vote_is_for_the_answer_and_its_first_response_gives_the_reward():
    """Two of four say 7, the first of them without the format that the other is paid for."""
    responses = ("is <answer>8</answer>", 0.0), ("<answer>7</answer>", 1.0), ("so <answer> 7</answer>", 1.1), ("9", 0.0)
    # pass@2 = 1 - C(2,2)/C(4,2) = 5/6
    assert group_metrics(*responses) == pytest.approx(
        {"eval/pass@1": 0.5, "eval/pass@2": 5 / 6, "eval/pass@4": 1.0, "eval/maj@4": 1.0}
    )


def test_an_excluded_response_neither_passes_nor_fails_nor_votes():
    """RWD-07: three of four remain, one of them passes: pass@2 = 1 - C(2,2)/C(3,2) = 2/3; there is no pass@4."""
    responses = ("5", None), ("5", 1.0), ("6", 0.0), ("6", 0.25)
    assert group_metrics(*responses) == pytest.approx({"eval/pass@1": 1 / 3, "eval/pass@2": 2 / 3, "eval/maj@4": 0.0})
    assert group_metrics(*[("5", None)] * 4) == {}
