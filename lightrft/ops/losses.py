"""Losses of policy and critic, by token, and the scale that turns their sums into a token mean."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of each token, and where clipping cuts its gradient off."""

    losses: Float[Tensor, "tokens"]
    clipped_low: Bool[Tensor, "tokens"]
    """The ratio is under `1 - eps_low` and the advantage is negative."""
    clipped_high: Bool[Tensor, "tokens"]
    """The ratio is over `1 + eps_high` and the advantage is positive."""


def ppo_clip_loss(
    log_probs: Float[Tensor, "tokens"],
    old_log_probs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    eps_low: float,
    eps_high: float,
) -> PolicyLoss:
    """Clipped surrogate, as a loss: the ratio gains nothing outside `1 - eps_low .. 1 + eps_high`.

    Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; two epsilons: Yu et al., "DAPO"
    (2025), eq. 10.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    clipped_ratio = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    return PolicyLoss(
        losses=-torch.minimum(ratio * advantages, clipped_ratio * advantages),
        clipped_low=(ratio < 1.0 - eps_low) & (advantages < 0),
        clipped_high=(ratio > 1.0 + eps_high) & (advantages > 0),
    )


def value_loss(
    values: Float[Tensor, "tokens"],
    old_values: Float[Tensor, "tokens"],
    returns: Float[Tensor, "tokens"],
    clip: float,
) -> Float[Tensor, "tokens"]:
    """Half the squared error of the value, or of the value held within `clip` of its old one, whichever is larger.

    Args:
        clip: 0 does not clip.

    Source: Engstrom et al., "Implementation Matters in Deep Policy Gradients" (2020), section 3, item 1.
    """
    squared_errors = (values - returns).square()
    if clip == 0:
        return 0.5 * squared_errors
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(squared_errors, (clipped_values - returns).square())


def token_mean_scale(num_tokens: int | float, world_size: int) -> float:
    """Factor of each micro-batch's `masked_sum`, so that gradients averaged over ranks are those of the global mean.

    Args:
        num_tokens: Kept tokens of the whole optimizer step, over all ranks and micro-batches.

    Returns:
        0 when there is no token: the loss and its gradients are then exact zeros.
    """
    return world_size / num_tokens if num_tokens else 0.0
