"""Aggregation: how the losses of tokens become one loss of an optimizer step, whatever its micro-batches and ranks.

A mode is a weight of each token and a count: a step's loss is the sum over all kept tokens of `weight * loss`, over the
count. Weights depend on the token's own sample alone, and counts add up over micro-batches and ranks, so no split of a
step changes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightrft.ops.segments import kept_counts, segment_ids


@dataclass(frozen=True)
class Aggregation:
    """One mode of `--loss_agg_mode`."""

    weights: Callable[[Bool[Tensor, "tokens"], Sequence[int], int], Float[Tensor, "tokens"]]
    """`(action_mask (N,), lengths, max_new_tokens) -> (N,)`; what stands at masked tokens is not read."""
    counts_samples: bool
    """Whether the divisor is the number of samples with a kept token, or that of the kept tokens."""

    def count(self, mask: Bool[Tensor, "tokens"], lengths: Sequence[int]) -> int:
        """The divisor of these samples alone; that of an optimizer step is the sum over its samples on all ranks."""
        return int((kept_counts(mask, lengths) > 0).sum()) if self.counts_samples else int(mask.sum())


def ones(mask: Bool[Tensor, "tokens"], lengths: Sequence[int], max_new_tokens: int) -> Float[Tensor, "tokens"]:
    """Every token counts alike."""
    return torch.ones(mask.shape, device=mask.device)


def sample_means(mask: Bool[Tensor, "tokens"], lengths: Sequence[int], max_new_tokens: int) -> Float[Tensor, "tokens"]:
    """Every sample counts alike: a token the less, the longer its sample is."""
    counts = kept_counts(mask, lengths).clamp(min=1)
    return 1.0 / counts[segment_ids(lengths, mask.device)]


def constant_means(
    mask: Bool[Tensor, "tokens"], lengths: Sequence[int], max_new_tokens: int
) -> Float[Tensor, "tokens"]:
    """Every token counts alike, as if all samples were as long as they may be.

    Source: Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective" (2025), listing 1 (Dr. GRPO).
    """
    return torch.full(mask.shape, 1.0 / max_new_tokens, device=mask.device)


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": Aggregation(ones, counts_samples=False),
    "seq-mean-token-mean": Aggregation(sample_means, counts_samples=True),
    "seq-mean-token-sum": Aggregation(ones, counts_samples=True),
    "seq-mean-token-sum-norm": Aggregation(constant_means, counts_samples=True),
}
"""By the name that `--loss_agg_mode` takes."""


def mean_scale(count: int | float, world_size: int) -> float:
    """Factor of each micro-batch's sum, so that gradients averaged over ranks are those of the global mean.

    Args:
        count: Divisor of the whole optimizer step, over all ranks and micro-batches.

    Returns:
        0 when nothing is kept: the loss and its gradients are then exact zeros.
    """
    return world_size / count if count else 0.0
