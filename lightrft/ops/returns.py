"""Returns: from scores and KL to discounted sums of the kept tokens, with or without a critic."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightrft.ops.segments import kept_counts, last_kept_index, zero_masked


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
