"""Advantages: from scores and KL to one number a token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from lightrft.ops.segments import kept_counts, last_kept_index, zero_masked


@dataclass(frozen=True)
class AdvantageInputs:
    """What any estimator may read."""

    scores: Float[Tensor, "samples"]
    groups: Int[Tensor, "samples"]
    """Equal for samples of the same prompt."""
    valid: Bool[Tensor, "samples"]
    """False = excluded: the score is not read. Its tokens are False in `action_mask`."""
    action_mask: Bool[Tensor, "tokens"]
    lengths: Sequence[int]
    kl: Float[Tensor, "tokens"] | None
    """None when no KL is taken off the reward."""
    kl_coef: float
    values: Float[Tensor, "tokens"] | None
    """None without a critic."""
    bootstrap_values: Float[Tensor, "samples"] | None
    """Value after the last token: 0 after a stop. None without a critic."""
    gamma: float
    lambd: float


def gae_advantages(inputs: AdvantageInputs) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """`gae` of the raw scores and the KL: advantages and the critic's targets.

    Formula: A_t = sum over k of (gamma lambd)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k})

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016).
    """
    assert inputs.values is not None and inputs.bootstrap_values is not None, "gae needs a critic's values"
    scores = zero_masked(inputs.scores, inputs.valid)
    rewards = token_rewards(scores, inputs.kl, inputs.kl_coef, inputs.action_mask, inputs.lengths)
    return gae(
        rewards,
        inputs.values,
        inputs.action_mask,
        inputs.lengths,
        inputs.bootstrap_values,
        inputs.gamma,
        inputs.lambd,
    )


def group_norm_advantages(inputs: AdvantageInputs) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Discounted returns of the `group_norm` scores and the KL; advantages and returns are the same.

    Formula: A = (score - mean of its prompt's samples) / (their sample standard deviation + 1e-6)

    Source: Shao et al., "DeepSeekMath" (2024), section 4.1.2 (GRPO).
    """
    scores = group_norm(inputs.scores, inputs.groups, inputs.valid)
    rewards = token_rewards(scores, inputs.kl, inputs.kl_coef, inputs.action_mask, inputs.lengths)
    returns = discounted_returns(rewards, inputs.action_mask, inputs.lengths, inputs.gamma)
    return returns, returns


ADVANTAGE_ESTIMATORS: dict[str, Callable[[AdvantageInputs], tuple[Tensor, Tensor]]] = {
    "gae": gae_advantages,
    "group_norm": group_norm_advantages,
}
"""`inputs -> (advantages (N,), returns (N,))`, 0 at masked tokens, by the name that `--advantage_estimator` takes."""


def token_rewards(
    scores: Float[Tensor, "samples"],
    kl: Float[Tensor, "tokens"] | None,
    kl_coef: float,
    action_mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
) -> Float[Tensor, "tokens"]:
    """`-kl_coef * kl` at each kept token, plus the sample's score at its last kept token."""
    penalty = scores.new_zeros(action_mask.shape) if kl is None else zero_masked(-kl_coef * kl, action_mask)
    last = last_kept_index(action_mask, lengths)
    has_tokens = last >= 0
    return penalty.index_add(0, last[has_tokens], scores[has_tokens].to(penalty.dtype))


def gae(
    rewards: Float[Tensor, "tokens"],
    values: Float[Tensor, "tokens"],
    action_mask: Bool[Tensor, "tokens"],
    lengths: Sequence[int],
    bootstrap_values: Float[Tensor, "samples"],
    gamma: float,
    lambd: float,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Generalised advantages and the returns (advantage + value) of the kept tokens, as if no other tokens existed.

    Args:
        bootstrap_values: Value after the last kept token of each sample: 0 after a stop.

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016),
    eq. 16.
    """
    counts = kept_counts(action_mask, lengths)
    kept_values = values[action_mask]
    deltas = rewards[action_mask] + gamma * _next_values(kept_values, counts, bootstrap_values) - kept_values
    advantages = _reverse_discounted_sum(deltas, counts, gamma * lambd)
    return _restore(advantages, action_mask), _restore(advantages + kept_values, action_mask)


def discounted_returns(
    rewards: Float[Tensor, "tokens"], action_mask: Bool[Tensor, "tokens"], lengths: Sequence[int], gamma: float
) -> Float[Tensor, "tokens"]:
    """Discounted sum of the rewards from each kept token on; masked tokens cost no discount."""
    kept = _reverse_discounted_sum(rewards[action_mask], kept_counts(action_mask, lengths), gamma)
    return _restore(kept, action_mask)


def group_norm(
    scores: Float[Tensor, "samples"],
    groups: Int[Tensor, "samples"],
    valid: Bool[Tensor, "samples"],
    eps: float = 1e-6,
) -> Float[Tensor, "samples"]:
    """(score - mean) / sample standard deviation within each group, over its valid samples.

    Exact zeros for excluded samples, for groups whose scores are all equal and for groups with fewer than two valid
    samples.

    Args:
        eps: Added to the standard deviation.

    Source: Shao et al., "DeepSeekMath" (2024), section 4.1.2.
    """
    statistics = _group_statistics(scores, groups, valid)
    sample = statistics.index
    normalised = (scores.double() - statistics.mean[sample]) / (statistics.std[sample] + eps)
    return zero_masked(normalised, valid & ~statistics.constant[sample]).to(scores.dtype)


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
    """Groups, and those to which `group_norm` gives zeros."""
    statistics = _group_statistics(scores, groups, valid)
    too_small = statistics.count < 2
    return GroupCounts(
        total=too_small.numel(),
        too_small=int(too_small.sum()),
        zero_variance=int((statistics.constant & ~too_small).sum()),
    )


@dataclass(frozen=True)
class _GroupStatistics:
    index: Int[Tensor, "samples"]
    """Row of each sample's group in the fields below."""
    count: Int[Tensor, "groups"]
    mean: Float64[Tensor, "groups"]
    std: Float64[Tensor, "groups"]
    """Sample standard deviation (divisor: count - 1)."""
    constant: Bool[Tensor, "groups"]
    """All valid scores are equal: also with one of them, or none."""


def _group_statistics(
    scores: Float[Tensor, "samples"], groups: Int[Tensor, "samples"], valid: Bool[Tensor, "samples"]
) -> _GroupStatistics:
    group_ids, index = torch.unique(groups, return_inverse=True)
    valid_index, valid_scores = index[valid], scores[valid].double()
    zeros = valid_scores.new_zeros(group_ids.shape)
    count = torch.bincount(valid_index, minlength=group_ids.numel())
    mean = zeros.index_add(0, valid_index, valid_scores) / count.clamp(min=1)
    squares = zeros.index_add(0, valid_index, (valid_scores - mean[valid_index]).square())
    lowest = zeros.scatter_reduce(0, valid_index, valid_scores, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, valid_index, valid_scores, "amax", include_self=False)
    # Compared, not read off the deviation: the mean of seven scores of 0.1 is not 0.1.
    return _GroupStatistics(index, count, mean, (squares / (count - 1).clamp(min=1)).sqrt(), lowest == highest)


def _next_values(
    values: Float[Tensor, "tokens"], counts: Int[Tensor, "samples"], bootstrap_values: Float[Tensor, "samples"]
) -> Float[Tensor, "tokens"]:
    """Value of the following token; after a sample's last one, its bootstrap value."""
    has_tokens = counts > 0
    last = counts.cumsum(0)[has_tokens] - 1
    return values.roll(-1).index_copy(0, last, bootstrap_values[has_tokens].to(values.dtype))


def _reverse_discounted_sum(
    values: Float[Tensor, "tokens"], counts: Int[Tensor, "samples"], decay: float
) -> Float[Tensor, "tokens"]:
    """`sum(t) = value(t) + decay * sum(t + 1)` within each sample."""
    num_columns = max(counts.tolist(), default=0)
    is_token = torch.arange(num_columns, device=counts.device) < counts.unsqueeze(1)
    columns = list(values.new_zeros(is_token.shape).masked_scatter(is_token, values).unbind(1))
    for column in reversed(range(num_columns - 1)):
        columns[column] = columns[column] + decay * columns[column + 1]
    return torch.stack(columns, dim=1)[is_token] if columns else values


def _restore(kept: Float[Tensor, "kept"], mask: Bool[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """`kept` back at the kept positions, 0 at the others."""
    return kept.new_zeros(mask.shape).masked_scatter(mask, kept)
