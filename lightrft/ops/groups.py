"""Groups: the scores of one prompt's samples, compared with each other.

Everywhere, exact zeros go to excluded samples, to groups whose valid scores are all equal and to groups with fewer than
two valid samples.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from lightrft.ops.segments import zero_masked


def group_norm(
    scores: Float[Tensor, "samples"],
    groups: Int[Tensor, "samples"],
    valid: Bool[Tensor, "samples"],
    eps: float = 1e-6,
    divisor: Literal["count - 1", "count"] = "count - 1",
) -> Float[Tensor, "samples"]:
    """(score - mean) / standard deviation within each group, over its valid samples.

    Args:
        eps: Added to the standard deviation.
        divisor: Of the squared differences: the sample or the population deviation.

    Source: Shao et al., "DeepSeekMath" (2024), section 4.1.2.
    """
    statistics = group_statistics(scores, groups, valid)
    std = statistics.std if divisor == "count - 1" else statistics.population_std
    normalised = (scores.double() - statistics.mean[statistics.index]) / (std[statistics.index] + eps)
    return _compared(normalised, statistics, valid, scores)


def group_center(
    scores: Float[Tensor, "samples"], groups: Int[Tensor, "samples"], valid: Bool[Tensor, "samples"]
) -> Float[Tensor, "samples"]:
    """score - mean of its group's valid samples, this one among them."""
    statistics = group_statistics(scores, groups, valid)
    return _compared(scores.double() - statistics.mean[statistics.index], statistics, valid, scores)


def leave_one_out(
    scores: Float[Tensor, "samples"], groups: Int[Tensor, "samples"], valid: Bool[Tensor, "samples"]
) -> Float[Tensor, "samples"]:
    """score - mean of its group's other valid samples.

    Source: Kool et al., "Buy 4 REINFORCE Samples, Get a Baseline for Free!" (2019).
    """
    statistics = group_statistics(scores, groups, valid)
    count = statistics.count[statistics.index]
    # score - (sum - score) / (n - 1) is n / (n - 1) times the distance from the mean of all.
    centered = scores.double() - statistics.mean[statistics.index]
    return _compared(centered * count / (count - 1).clamp(min=1), statistics, valid, scores)


def best_margin(
    scores: Float[Tensor, "samples"], groups: Int[Tensor, "samples"], valid: Bool[Tensor, "samples"]
) -> Float[Tensor, "samples"]:
    """What a sample adds to the best score of its group: the margin of the best over the second; 0 for the others."""
    statistics = group_statistics(scores, groups, valid)
    index, kept = statistics.index, scores.double()
    is_best = valid & (kept == statistics.highest[index])
    # Where two samples share the best score, neither adds anything.
    others = valid & ~is_best
    second = statistics.highest.new_full(statistics.highest.shape, -torch.inf)
    second = second.scatter_reduce(0, index[others], kept[others], "amax")
    is_alone = torch.bincount(index[is_best], minlength=second.numel()) == 1
    return _compared(torch.where(is_best & is_alone[index], kept - second[index], 0.0), statistics, valid, scores)


@dataclass(frozen=True)
class GroupCounts:
    """How many groups teach nothing. Counts of ranks add up."""

    total: int
    too_small: int
    """Groups with fewer than two valid samples."""
    zero_variance: int
    """Groups with two valid samples or more whose scores are all equal."""


def count_groups(
    scores: Float[Tensor, "samples"], groups: Int[Tensor, "samples"], valid: Bool[Tensor, "samples"]
) -> GroupCounts:
    """Groups, and those to which comparing gives zeros."""
    statistics = group_statistics(scores, groups, valid)
    too_small = statistics.count < 2
    return GroupCounts(
        total=too_small.numel(),
        too_small=int(too_small.sum()),
        zero_variance=int((statistics.constant & ~too_small).sum()),
    )


@dataclass(frozen=True)
class GroupStatistics:
    index: Int[Tensor, "samples"]
    """Row of each sample's group in the fields below."""
    count: Int[Tensor, "groups"]
    mean: Float64[Tensor, "groups"]
    std: Float64[Tensor, "groups"]
    """Sample standard deviation (divisor: count - 1)."""
    population_std: Float64[Tensor, "groups"]
    """Standard deviation with the divisor count."""
    highest: Float64[Tensor, "groups"]
    constant: Bool[Tensor, "groups"]
    """All valid scores are equal: also with one of them, or none."""


def group_statistics(
    scores: Float[Tensor, "samples"], groups: Int[Tensor, "samples"], valid: Bool[Tensor, "samples"]
) -> GroupStatistics:
    """Over the valid samples of each group."""
    group_ids, index = torch.unique(groups, return_inverse=True)
    valid_index, valid_scores = index[valid], scores[valid].double()
    zeros = valid_scores.new_zeros(group_ids.shape)
    count = torch.bincount(valid_index, minlength=group_ids.numel())
    mean = zeros.index_add(0, valid_index, valid_scores) / count.clamp(min=1)
    squares = zeros.index_add(0, valid_index, (valid_scores - mean[valid_index]).square())
    lowest = zeros.scatter_reduce(0, valid_index, valid_scores, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, valid_index, valid_scores, "amax", include_self=False)
    return GroupStatistics(
        index=index,
        count=count,
        mean=mean,
        std=(squares / (count - 1).clamp(min=1)).sqrt(),
        population_std=(squares / count.clamp(min=1)).sqrt(),
        highest=highest,
        # Compared, not read off the deviation: the mean of seven scores of 0.1 is not 0.1.
        constant=lowest == highest,
    )


def _compared(
    values: Float64[Tensor, "samples"],
    statistics: GroupStatistics,
    valid: Bool[Tensor, "samples"],
    scores: Float[Tensor, "samples"],
) -> Float[Tensor, "samples"]:
    """`values` in the dtype of the scores, with the module's exact zeros."""
    return zero_masked(values, valid & ~statistics.constant[statistics.index]).to(scores.dtype)
