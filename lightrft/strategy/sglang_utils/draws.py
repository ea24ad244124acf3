"""Draws: token ids from the probabilities of a batch, each by a key of its own, as SGLang's sampler asks for them."""

import torch
from torch import Tensor

from lightrft.strategy.torch_utils.sampling import uniforms_from


def keyed_draws(
    probs: Tensor, mixed_keys: Tensor, positions: Tensor, top_ks: Tensor | None = None, top_ps: Tensor | None = None
) -> Tensor:
    """Token ids `(B,)`, int32, that do not depend on the rest of the batch.

    Args:
        probs: `(B, V)`.
        mixed_keys: `(B,)`, int64: `mix64` of each response's key.
        positions: `(B,)`: of the tokens that the drawn ones follow.
        top_ks: `(B,)`, with any number above V for the whole vocabulary; None does not filter.
        top_ps: `(B,)`, of what top-k left.
    """
    if top_ks is None or top_ps is None:
        return drawn(probs, mixed_keys, positions)
    kept, ids = probs.sort(descending=True, stable=True)
    ranks = torch.arange(kept.shape[-1], device=kept.device)
    kept = kept.masked_fill(ranks >= top_ks[:, None], 0.0)
    before = kept.cumsum(-1) - kept
    kept = kept.masked_fill(before >= top_ps[:, None] * kept.sum(-1, keepdim=True), 0.0)
    return ids.gather(-1, drawn(kept, mixed_keys, positions)[:, None].long()).squeeze(-1).int()


def drawn(weights: Tensor, mixed_keys: Tensor, positions: Tensor) -> Tensor:
    """Token ids `(B,)`, int32, in proportion to weights `(B, V)`, by the uniform number of each key and position."""
    if weights.is_cuda:
        # Each operation is a launch in SGLang's only thread, for each token of all responses.
        from lightrft.strategy.sglang_utils import draw_kernels

        return draw_kernels.drawn(weights, mixed_keys, positions)
    return inverse_cdf(weights, uniforms_from(mixed_keys, positions)).int()


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """For each row the first index whose cumulative share is above its uniform number, `(B,)`; sums are in float64.

    Args:
        weights: `(B, V)`, in proportion to probabilities.
        uniforms: `(B,)` in [0, 1).
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    # Rounding must not carry a target to the total, which no entry passes.
    targets = uniforms[:, None].clamp(max=1 - 2**-52) * cdf[:, -1:]
    # right=True passes over weights of 0, at a target of 0 as well. NaN passes over all.
    return torch.searchsorted(cdf, targets, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)
