"""Shaping: what becomes of a reward before advantages are made of it."""

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from lightrft.ops.segments import mean_std, zero_masked


def soft_overlong_penalty(
    lengths: Int[Tensor, "samples"], max_new_tokens: int, buffer_len: int, factor: float
) -> Float[Tensor, "samples"]:
    """What a response that comes near the limit adds to its reward: 0 down to `-factor`, over a buffer before it.

    Formula: factor clip((max_new_tokens - buffer_len - length) / buffer_len, -1, 0)

    Source: Yu et al., "DAPO" (2025), eq. 13.
    """
    return factor * ((max_new_tokens - buffer_len - lengths) / buffer_len).clamp(-1.0, 0.0)


def normalise_rewards(
    rewards: Float[Tensor, "samples"],
    valid: Bool[Tensor, "samples"],
    moments: Float64[Tensor, "3"],
    subtract_mean: bool,
    eps: float = 1e-8,
) -> Float[Tensor, "samples"]:
    """Valid rewards over the population standard deviation under `moments`, less its mean where asked for; others 0.

    Where all rewards that were ever seen are equal there is nothing to divide by: they keep their scale.

    Args:
        moments: (sum, sum of squares, count) of all rewards of the run so far, these among them.
        eps: Deviation up to which rewards count as equal.
    """
    mean, std = mean_std(moments)
    centered = rewards.double() - (mean if subtract_mean else 0.0)
    return zero_masked(centered / torch.where(std > eps, std, 1.0), valid).to(rewards.dtype)
