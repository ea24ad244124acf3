import math

import pytest
import torch

from lightrft.ops.groups import GroupCounts, best_margin, count_groups, group_center, group_norm, leave_one_out

ALL_VALID = torch.tensor([True] * 4)
COMPARISONS = (group_norm, group_center, leave_one_out, best_margin)


def keep(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool)


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


def test_the_population_deviation_divides_by_the_count():
    # [1, 0, 0, 0]: mean 0.25, sqrt((0.5625 + 3 * 0.0625) / 4) = 0.433; 0.75 / 0.433 = 1.7321
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0])
    normalised = group_norm(scores, torch.zeros(4, dtype=torch.int64), ALL_VALID, divisor="count")
    assert normalised.tolist() == pytest.approx([1.7321, -0.5774, -0.5774, -0.5774], abs=1e-4)


@pytest.mark.parametrize(
    ("compare", "expected"),
    [
        (group_center, [0.5, -0.5, -0.5, 0.5]),
        # 1 - (0 + 0 + 1) / 3 and 0 - (1 + 0 + 1) / 3
        (leave_one_out, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        (best_margin, [0.0, 0.0, 0.0, 0.0]),  # Without either of the best ones, the best score is still 1.
    ],
)
def test_comparisons_without_a_deviation(compare, expected):
    """NUM-09."""
    compared = compare(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.int64), ALL_VALID)
    assert compared.tolist() == pytest.approx(expected)


def test_only_the_single_best_sample_adds_to_the_best_score():
    # Group 0: 3 over 1. Group 1: -2 over -5, though both are negative; the excluded 9 is not the best.
    scores = torch.tensor([3.0, 1.0, 0.5, -2.0, -5.0, 9.0])
    valid = torch.tensor([True] * 5 + [False])
    margins = best_margin(scores, torch.tensor([0, 0, 0, 1, 1, 1]), valid)
    assert margins.tolist() == [2.0, 0.0, 0.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize("compare", COMPARISONS)
def test_what_teaches_nothing_gets_exact_zeros(compare):
    """RWD-07: equal scores, a single score, only Nones, and a None beside scores that differ."""
    nan = math.nan
    scores = torch.tensor([0.1] * 7 + [5.0, nan] + [nan, nan] + [1.0, nan, 0.0])
    groups = torch.tensor([0] * 7 + [1] * 2 + [2] * 2 + [3] * 3)
    compared = compare(scores, groups, ~scores.isnan())
    assert compared[:11].count_nonzero() == 0
    assert compared[12] == 0 and compared[11] > 0


@pytest.mark.parametrize("compare", COMPARISONS)
def test_no_samples_at_all_give_empty_results(compare):
    none, no_ids, no_mask = torch.zeros(0), torch.zeros(0, dtype=torch.int64), keep(0)
    assert compare(none, no_ids, no_mask).shape == (0,)
    assert count_groups(none, no_ids, no_mask) == GroupCounts(0, 0, 0)
