"""Draws: token ids from the probabilities of a batch, each by a key of its own, as SGLang's sampler asks for them."""

from functools import lru_cache

import torch
from torch import Tensor

from lightrft.strategy.torch_utils.sampling import uniforms_from

_BLOCK = 128
"""Neighbours in the vocabulary that are summed first: a cumulative sum of the whole in float64 would cost as much
memory as the probabilities twice. Most vocabularies are padded to a multiple of it, which saves operations."""


def keyed_draws(
    probs: Tensor, mixed_keys: Tensor, positions: Tensor, top_ks: Tensor | None = None, top_ps: Tensor | None = None
) -> Tensor:
    """Token ids `(B,)`, int32, that do not depend on the rest of the batch.

    Each operation is a launch in SGLang's only thread, for each token of all responses: there should be few.

    Args:
        probs: `(B, V)`.
        mixed_keys: `(B,)`, int64: `mix64` of each response's key.
        positions: `(B,)`: of the tokens that the drawn ones follow.
        top_ks: `(B,)`, with any number above V for the whole vocabulary; None does not filter.
        top_ps: `(B,)`, of what top-k left.
    """
    uniforms = uniforms_from(mixed_keys, positions)
    if top_ks is None or top_ps is None:
        return inverse_cdf(probs, uniforms).int()
    kept, ids = probs.sort(descending=True, stable=True)
    ranks = torch.arange(kept.shape[-1], device=kept.device)
    kept = kept.masked_fill(ranks >= top_ks[:, None], 0.0)
    before = kept.cumsum(-1) - kept
    kept = kept.masked_fill(before >= top_ps[:, None] * kept.sum(-1, keepdim=True), 0.0)
    return ids.gather(-1, inverse_cdf(kept, uniforms)[:, None]).squeeze(-1).int()


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """For each row the first index whose cumulative share is above its uniform number, `(B,)`; sums are in float64.

    Args:
        weights: `(B, V)`, in proportion to probabilities.
        uniforms: `(B,)` in [0, 1).
    """
    size = weights.shape[-1]
    whole = size // _BLOCK * _BLOCK
    sums = weights[:, :whole].unflatten(-1, (whole // _BLOCK, _BLOCK)).sum(-1, dtype=torch.float64)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], -1)
    cdf = sums.cumsum(-1)
    targets = uniforms[:, None] * cdf[:, -1:]
    blocks = _passed(cdf, targets)
    before = cdf.gather(-1, blocks) - sums.gather(-1, blocks)
    columns = torch.add(_columns(weights.device), blocks, alpha=_BLOCK)
    if whole < size:
        # Columns behind the last one have no weight.
        inside = weights.gather(-1, columns.clamp(max=size - 1)).masked_fill(columns >= size, 0.0)
    else:
        inside = weights.gather(-1, columns)
    places = _passed(inside.cumsum(-1, dtype=torch.float64), targets - before)
    return torch.add(places, blocks, alpha=_BLOCK).squeeze(-1).clamp(max=size - 1)


def _passed(cdf: Tensor, targets: Tensor) -> Tensor:
    """Index at which each row's sum passes its target, `(B, 1)`."""
    # Rounding must not carry a target to the total, which no entry passes, nor below 0.
    targets = torch.minimum(targets.clamp(min=0.0), cdf[:, -1:] * (1 - 2**-52))
    # right=True passes over weights of 0, at a target of 0 as well. NaN passes over all.
    return torch.searchsorted(cdf, targets, right=True).clamp(max=cdf.shape[-1] - 1)


@lru_cache(maxsize=2)
def _columns(device: torch.device) -> Tensor:
    return torch.arange(_BLOCK, device=device)
