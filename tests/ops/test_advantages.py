import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from lightrft.config.arguments import AdvantageEstimator
from lightrft.ops.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    GroupCounts,
    count_groups,
    discounted_returns,
    gae,
    group_norm,
    token_rewards,
)
from lightrft.ops.kl import k1_kl

ALL_VALID = torch.tensor([True] * 4)


def keep(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool)


def ragged_inputs(seed: int, dtype: torch.dtype = torch.float64) -> AdvantageInputs:
    """Four groups of four samples, of 0 to 9 tokens; about a third of the tokens masked, with NaN behind the mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=dtype)

    lengths = torch.randint(0, 10, (16,), generator=generator).tolist()
    valid = torch.rand(16, generator=generator) > 0.2
    counts = torch.tensor(lengths)
    mask = (torch.rand(sum(lengths), generator=generator) > 0.3) & valid.repeat_interleave(counts)
    kl, values = normal(sum(lengths)), normal(sum(lengths))
    kl[~mask] = values[~mask] = math.nan
    scores = torch.where(valid, normal(16), math.nan)
    return AdvantageInputs(
        scores=scores,
        groups=torch.arange(4).repeat_interleave(4),
        valid=valid,
        action_mask=mask,
        lengths=lengths,
        kl=kl,
        kl_coef=0.1,
        values=values,
        bootstrap_values=normal(16),
        gamma=0.97,
        lambd=0.9,
    )


def take_samples(inputs: AdvantageInputs, order: list[int]) -> AdvantageInputs:
    """The samples in `order`; all of it, or some."""

    def tokens(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split(list(inputs.lengths))
        return torch.cat([parts[i] for i in order])

    assert inputs.kl is not None and inputs.values is not None and inputs.bootstrap_values is not None
    return replace(
        inputs,
        scores=inputs.scores[order],
        groups=inputs.groups[order],
        valid=inputs.valid[order],
        action_mask=tokens(inputs.action_mask),
        lengths=[inputs.lengths[i] for i in order],
        kl=tokens(inputs.kl),
        values=tokens(inputs.values),
        bootstrap_values=inputs.bootstrap_values[order],
    )


def test_estimators_are_those_that_the_config_names():
    assert set(ADVANTAGE_ESTIMATORS) == set(get_args(AdvantageEstimator))


def test_score_lands_on_the_last_kept_token():
    """NUM-13: after a stop, in a truncated response of five tokens, before masked tokens, nowhere."""
    scores = torch.tensor([2.0, 3.0, 4.0, 5.0])
    mask = torch.cat([keep(3), keep(5), torch.tensor([True, False]), torch.tensor([False])])
    rewards = token_rewards(scores, None, 0.0, mask, [3, 5, 2, 1])
    assert rewards.tolist() == [0, 0, 2, 0, 0, 0, 0, 3, 4, 0, 0]


def test_kl_is_subtracted_from_the_reward():
    """NUM-10: 1 - 0.1 * (-1.0 + 1.5) = 0.95."""
    kl = k1_kl(torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert token_rewards(torch.ones(1), kl, 0.1, keep(1), [1]).item() == pytest.approx(0.95)


def test_kl_of_masked_tokens_is_not_read():
    kl = torch.tensor([1.0, math.nan, 3.0])
    rewards = token_rewards(torch.zeros(1), kl, 0.5, torch.tensor([True, False, True]), [3])
    assert rewards.tolist() == [-0.5, 0.0, -1.5]


def test_gae_skips_masked_tokens():
    """NUM-15: deltas 0, 0, 1 - 0.5; 0.5, then 0.95 * 0.5, then 0.95 * 0.475; the masked value of 7 is not read."""
    advantages, returns = gae(
        rewards=torch.tensor([0.0, 0.0, 1.0, 0.0]),
        values=torch.tensor([0.5, 0.5, 0.5, 7.0]),
        action_mask=torch.tensor([True, True, True, False]),
        lengths=[4],
        bootstrap_values=torch.zeros(1),
        gamma=1.0,
        lambd=0.95,
    )
    assert advantages.tolist() == pytest.approx([0.45125, 0.475, 0.5, 0.0])
    assert returns.tolist() == pytest.approx([0.95125, 0.975, 1.0, 0.0])
    assert (advantages[3], returns[3]) == (0.0, 0.0)


def test_gae_of_a_masked_token_in_the_middle_is_that_of_the_kept_tokens_alone():
    """NUM-15."""
    whole = gae(
        torch.tensor([0.0, math.nan, 1.0]),
        torch.tensor([0.5, math.inf, 0.25]),
        torch.tensor([True, False, True]),
        [3],
        torch.zeros(1),
        1.0,
        0.5,
    )
    # deltas 0 + 0.25 - 0.5 and 1 - 0.25; advantages -0.25 + 0.5 * 0.75 and 0.75
    assert whole[0].tolist() == [0.125, 0.0, 0.75]
    assert whole[1].tolist() == [0.625, 0.0, 1.0]


def test_gae_goes_on_with_the_bootstrap_value():
    # delta = 0 + 0.9 * 2 - 1 after a truncation; 0 - 1 after a stop
    advantages, _ = gae(torch.zeros(2), torch.ones(2), keep(2), [1, 1], torch.tensor([2.0, 0.0]), gamma=0.9, lambd=0.95)
    assert advantages.tolist() == pytest.approx([0.8, -1.0])


def test_discounted_returns_of_a_final_reward():
    # The masked token costs no discount: 2 * 0.5^2, 2 * 0.5, 0, 2 | 3
    mask = torch.tensor([True, True, False, True, True])
    returns = discounted_returns(torch.tensor([0.0, 0.0, math.nan, 2.0, 3.0]), mask, [4, 1], gamma=0.5)
    assert returns.tolist() == [0.5, 1.0, 0.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("scores", "groups", "expected"),
    [
        # mean 0.25, deviation sqrt((0.5625 + 3 * 0.0625) / 3) = 0.5
        ([1.0, 0.0, 0.0, 0.0], [3, 3, 3, 3], [1.5, -0.5, -0.5, -0.5]),
        ([1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0], [0.0, 0.0, 0.0, 0.0]),
        # deviation sqrt(2 * 0.25 / 1) = 0.7071, 0.5 / 0.7071 = 0.7071; groups need not be neighbours
        ([1.0, 10.0, 0.0, 9.0], [7, 2, 7, 2], [0.7071, 0.7071, -0.7071, -0.7071]),
    ],
)
def test_group_norm_divides_by_the_sample_deviation(scores, groups, expected):
    """NUM-09."""
    normalised = group_norm(torch.tensor(scores), torch.tensor(groups), ALL_VALID)
    assert normalised.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_group_norm_of_equal_scores_is_exactly_zero(dtype):
    """NUM-09: in binary, the mean of seven scores of 0.1 is not 0.1."""
    scores = torch.cat([torch.full((7,), 0.1, dtype=dtype), torch.full((4,), 1.0, dtype=dtype)])
    groups = torch.tensor([0] * 7 + [1] * 4)
    assert group_norm(scores, groups, keep(11)).count_nonzero() == 0


def test_group_norm_of_scores_that_differ_by_rounding_is_almost_zero():
    scores = torch.tensor([0.3, 0.1 + 0.2, 0.3], dtype=torch.float64)
    assert scores[0] != scores[1]
    assert group_norm(scores, torch.zeros(3, dtype=torch.int64), keep(3)).abs().max() < 1e-6


def test_excluded_samples_leave_the_group_statistics():
    """RWD-07: [1, 0, None], a group of Nones only, a group with a single score."""
    scores = torch.tensor([1.0, 0.0, math.nan, math.nan, math.nan, 5.0, math.nan])
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    normalised = group_norm(scores, groups, ~scores.isnan())
    assert normalised.tolist() == pytest.approx([0.7071, -0.7071, 0.0, 0.0, 0.0, 0.0, 0.0], abs=1e-4)
    assert normalised[2:].count_nonzero() == 0


def test_groups_that_teach_nothing_are_counted():
    """RWD-07: groups [1, 0, None], [None, None], [5, None], [2, 2]."""
    scores = torch.tensor([1.0, 0.0, math.nan, math.nan, math.nan, 5.0, math.nan, 2.0, 2.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3])
    assert count_groups(scores, groups, ~scores.isnan()) == GroupCounts(total=4, too_small=2, zero_variance=1)


def test_no_samples_at_all_give_empty_results():
    none, no_ids, no_mask = torch.zeros(0), torch.zeros(0, dtype=torch.int64), keep(0)
    assert group_norm(none, no_ids, no_mask).shape == (0,)
    assert count_groups(none, no_ids, no_mask) == GroupCounts(0, 0, 0)
    assert token_rewards(none, none, 0.1, no_mask, []).shape == (0,)
    assert discounted_returns(none, no_mask, [], 1.0).shape == (0,)
    advantages, returns = gae(none, none, no_mask, [], none, 1.0, 0.95)
    assert advantages.shape == returns.shape == (0,)


def test_group_norm_estimator_gives_every_kept_token_its_normalised_score():
    # scores 1 and 0: +-0.7071; no KL, no discount; the score's token is not the only one that gets it
    inputs = AdvantageInputs(
        scores=torch.tensor([1.0, 0.0]),
        groups=torch.tensor([0, 0]),
        valid=keep(2),
        action_mask=torch.tensor([True, True, True, False, True]),
        lengths=[2, 3],
        kl=None,
        kl_coef=0.0,
        values=None,
        bootstrap_values=None,
        gamma=1.0,
        lambd=1.0,
    )
    advantages, returns = ADVANTAGE_ESTIMATORS["group_norm"](inputs)
    assert advantages.tolist() == pytest.approx([0.7071, 0.7071, -0.7071, 0.0, -0.7071], abs=1e-4)
    assert torch.equal(advantages, returns)


def test_gae_estimator_uses_the_raw_score():
    # one token each: advantage = score - 0.1 * kl + bootstrap - value = 3 - 0.05 + 0 - 1; return = advantage + value
    inputs = AdvantageInputs(
        scores=torch.tensor([3.0]),
        groups=torch.tensor([0]),
        valid=keep(1),
        action_mask=keep(1),
        lengths=[1],
        kl=torch.tensor([0.5]),
        kl_coef=0.1,
        values=torch.tensor([1.0]),
        bootstrap_values=torch.zeros(1),
        gamma=1.0,
        lambd=0.95,
    )
    advantages, returns = ADVANTAGE_ESTIMATORS["gae"](inputs)
    assert (advantages.item(), returns.item()) == pytest.approx((1.95, 2.95))


def slow_group_norm(inputs: AdvantageInputs) -> list[float]:
    result = [0.0] * len(inputs.lengths)
    for group in set(inputs.groups.tolist()):
        members = [i for i in range(len(result)) if inputs.groups[i] == group and inputs.valid[i]]
        if len(members) < 2:
            continue
        scores = [inputs.scores[i].item() for i in members]
        mean = sum(scores) / len(scores)
        std = math.sqrt(sum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
        for i, score in zip(members, scores, strict=True):
            result[i] = (score - mean) / (std + 1e-6)
    return result


def slow_estimator(name: str, inputs: AdvantageInputs) -> tuple[list[float], list[float]]:
    """Both estimators, token by token from the end of each sample."""
    assert inputs.kl is not None and inputs.values is not None and inputs.bootstrap_values is not None
    scores = slow_group_norm(inputs) if name == "group_norm" else inputs.scores.tolist()
    advantages, returns = [0.0] * len(inputs.kl), [0.0] * len(inputs.kl)
    end = 0
    for sample, length in enumerate(inputs.lengths):
        start, end = end, end + length
        kept = [t for t in range(start, end) if inputs.action_mask[t]]
        running, next_value, reward = 0.0, inputs.bootstrap_values[sample].item(), scores[sample]
        for t in reversed(kept):
            reward -= inputs.kl_coef * inputs.kl[t].item()
            value = inputs.values[t].item()
            if name == "gae":
                running = reward + inputs.gamma * next_value - value + inputs.gamma * inputs.lambd * running
                returns[t] = running + value
            else:
                running = reward + inputs.gamma * running
                returns[t] = running
            advantages[t] = running
            next_value, reward = value, 0.0
    return advantages, returns


@pytest.mark.parametrize("name", ["gae", "group_norm"])
@pytest.mark.parametrize("seed", range(5))
def test_estimators_equal_a_slow_reference(name, seed):
    inputs = ragged_inputs(seed)
    advantages, returns = ADVANTAGE_ESTIMATORS[name](inputs)
    expected_advantages, expected_returns = slow_estimator(name, inputs)
    assert advantages.tolist() == pytest.approx(expected_advantages, abs=1e-6)
    assert returns.tolist() == pytest.approx(expected_returns, abs=1e-6)
    masked = ~inputs.action_mask
    assert advantages[masked].count_nonzero() == returns[masked].count_nonzero() == 0


@pytest.mark.parametrize("name", ["gae", "group_norm"])
def test_fp32_stays_close_to_fp64(name):
    single, double = ragged_inputs(0, torch.float32), ragged_inputs(0, torch.float32)
    double = replace(
        double,
        **{key: getattr(double, key).double() for key in ("scores", "kl", "values", "bootstrap_values")},
    )
    for low, high in zip(ADVANTAGE_ESTIMATORS[name](single), ADVANTAGE_ESTIMATORS[name](double), strict=True):
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), high, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gae", "group_norm"])
@pytest.mark.parametrize("seed", range(3))
def test_permuting_samples_permutes_advantages(name, seed):
    inputs = ragged_inputs(seed)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).tolist()
    permuted = ADVANTAGE_ESTIMATORS[name](take_samples(inputs, order))
    for flat, other in zip(ADVANTAGE_ESTIMATORS[name](inputs), permuted, strict=True):
        parts = flat.split(list(inputs.lengths))
        torch.testing.assert_close(other, torch.cat([parts[i] for i in order]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gae", "group_norm"])
def test_splitting_into_whole_groups_changes_nothing(name):
    inputs = ragged_inputs(1)
    groups = [list(range(start, start + 4)) for start in range(0, 16, 4)]
    shards = [ADVANTAGE_ESTIMATORS[name](take_samples(inputs, group)) for group in groups]
    for flat, parts in zip(ADVANTAGE_ESTIMATORS[name](inputs), zip(*shards, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts), flat, rtol=0, atol=1e-12)
