"""Sums and moments of flat response tokens, by sample and over all of them.

The response tokens of `B` samples are concatenated, `(N,)`; `lengths` holds the tokens of each sample, so that
`sum(lengths)` is `N`. Masks are True = keep. What stands at a masked position, even NaN or infinity, reaches no result.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor


def segment_ids(lengths: Sequence[int], device: torch.device | str) -> Int[Tensor, "tokens"]:
    """Index of the sample that each token belongs to."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), counts, output_size=sum(lengths))


def kept_counts(mask: Bool[Tensor, "tokens"], lengths: Sequence[int]) -> Int[Tensor, "samples"]:
    """Kept tokens of each sample."""
    return torch.bincount(segment_ids(lengths, mask.device)[mask], minlength=len(lengths))


def last_kept_index(mask: Bool[Tensor, "tokens"], lengths: Sequence[int]) -> Int[Tensor, "samples"]:
    """Index into the `N` tokens of the last kept token of each sample; -1 for a sample without any."""
    positions = torch.where(mask, torch.arange(mask.shape[0], device=mask.device), -1)
    last = positions.new_full((len(lengths),), -1)
    return last.scatter_reduce(0, segment_ids(lengths, mask.device), positions, reduce="amax")


def segment_sum(values: Float[Tensor, "tokens"], lengths: Sequence[int]) -> Float[Tensor, "samples"]:
    """Sum of each sample, in an order that no other sample changes."""
    if values.numel() == 0:  # segment_reduce refuses it.
        return values.new_zeros(len(lengths))
    # Not index_add: its atomics on CUDA give other bits in every run.
    counts = torch.tensor(lengths, dtype=torch.int64, device=values.device)
    return torch.segment_reduce(values, "sum", lengths=counts)


def segment_mean(
    values: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"], lengths: Sequence[int]
) -> Float[Tensor, "samples"]:
    """Mean over the kept tokens of each sample; 0 for a sample without any."""
    return segment_sum(zero_masked(values, mask), lengths) / kept_counts(mask, lengths).clamp(min=1)


def zero_masked(values: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """`values` with 0 at the masked positions, and no gradient to them.

    Elementwise losses have no mask: where their inputs may be infinite or NaN at masked positions, pass the inputs
    through here first. Masking the result alone leaves 0 * inf = NaN in the gradient.
    """
    return torch.where(mask, values, 0.0)


def masked_sum(values: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"]) -> Float[Tensor, ""]:
    """Sum over the kept tokens."""
    return zero_masked(values, mask).sum()


@torch.no_grad()
def masked_moments(values: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"]) -> Float64[Tensor, "3"]:
    """(sum, sum of squares, count) over the kept tokens. Moments of ranks add up to those of all their tokens."""
    kept = zero_masked(values.double(), mask)
    return torch.stack([kept.sum(), kept.square().sum(), mask.sum().double()])


def mean_std(moments: Float64[Tensor, "3"]) -> tuple[Float64[Tensor, ""], Float64[Tensor, ""]]:
    """Mean and population standard deviation (divisor: the count) that `moments` describe; zeros for a count of 0."""
    total, total_squares, count = moments
    divisor = count.clamp(min=1)
    mean = total / divisor
    return mean, (total_squares / divisor - mean.square()).clamp(min=0).sqrt()


def whiten(
    values: Float[Tensor, "tokens"], mask: Bool[Tensor, "tokens"], moments: Float64[Tensor, "3"], eps: float = 1e-8
) -> Float[Tensor, "tokens"]:
    """Kept values shifted and scaled to mean 0 and population standard deviation 1 under `moments`; masked ones 0.

    Args:
        moments: `masked_moments`, summed over the ranks.
        eps: Added to the standard deviation.
    """
    mean, std = mean_std(moments)
    return zero_masked((values.double() - mean) / (std + eps), mask).to(values.dtype)
