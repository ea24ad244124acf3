"""Step metrics: means over all ranks' samples and tokens."""

import pytest
import torch

from lightrft.rewards.records import RewardOutput
from lightrft.trainer.evaluation import before_and_after
from lightrft.trainer.fast_exp_maker import add_reward_means
from lightrft.trainer.records import with_deviation
from lightrft.trainer.rollouts import scored
from lightrft.utils.means import Means, merged_means
from tests.tiny_models import sample


def test_ranks_count_by_their_tokens():
    first, second = Means(), Means()
    first.add_masked("x", torch.tensor([1.0, 2.0]), torch.tensor([True, True]))
    second.add_masked("x", torch.tensor([6.0, float("nan")]), torch.tensor([True, False]))
    assert merged_means([first.sums, second.sums]) == {"x": 3.0}  # (1 + 2 + 6) / 3


def test_a_metric_that_nobody_counted_is_left_out():
    means = Means()
    means.add_masked("x", torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    assert merged_means([means.sums, {}]) == {}


def test_an_excluded_sample_leaves_the_mask_and_the_reward_statistics():
    kept = scored(sample([3], [4, 5]), RewardOutput(1.0, {"format": 0.5}))
    lost = scored(sample([3], [4, 5]), RewardOutput(None, {}))
    assert kept.action_mask.all() and not lost.action_mask.any()
    means = Means()
    add_reward_means(means, [kept, lost, scored(sample([3], [4]), RewardOutput(0.0, {"format": 1.0}))], "reward")
    metrics = with_deviation(merged_means([means.sums]), "reward")
    assert metrics == pytest.approx({"reward/mean": 0.5, "reward/format": 0.75, "reward/std": 0.5})


def test_the_summary_names_rewards_and_components_before_and_after():
    before = {"eval/mean": 0.2, "eval/accuracy": 0.2, "eval/std": 0.4}
    after = {"eval/mean": 0.9, "eval/accuracy": 0.9, "eval/std": 0.3}
    assert before_and_after(before, after) == {
        "reward_before": 0.2,
        "reward_after": 0.9,
        "accuracy_before": 0.2,
        "accuracy_after": 0.9,
    }
