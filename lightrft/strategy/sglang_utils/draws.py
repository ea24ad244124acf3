"""Draws: token ids from the probabilities of a batch, each by a key of its own, as SGLang's sampler asks for them."""

import torch
from torch import Tensor

from lightrft.strategy.torch_utils.sampling import uniforms_at

_BLOCK = 512
"""Neighbours in the vocabulary that are summed first: a cumulative sum of the whole in float64 would cost as much
memory as the probabilities twice."""


def keyed_draws(
    probs: Tensor, keys: Tensor, positions: Tensor, top_ks: Tensor | None = None, top_ps: Tensor | None = None
) -> Tensor:
    """Token ids `(B,)`, int32, that do not depend on the rest of the batch.

    Args:
        probs: `(B, V)`.
        keys: `(B,)`, int64: that of each response.
        positions: `(B,)`: of the tokens that the drawn ones follow.
        top_ks: `(B,)`, with any number above V for the whole vocabulary; None does not filter.
        top_ps: `(B,)`, of what top-k left.
    """
    uniforms = uniforms_at(keys, positions.long())
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
    sums = [weights[:, :whole].unflatten(-1, (whole // _BLOCK, _BLOCK)).sum(-1, dtype=torch.float64)]
    if whole < size:
        sums.append(weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64))
    block, share = _search(torch.cat(sums, -1), uniforms)
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(-1, columns.clamp(max=size - 1)).double().masked_fill(columns >= size, 0.0)
    place, _ = _search(inside, share)
    return (block * _BLOCK + place).clamp(max=size - 1)


def _search(weights: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Index at which each row's cumulative share passes the given one, and the share of its own weight that is left."""
    cdf = weights.cumsum(-1)
    total = cdf[:, -1:]
    # Rounding must not carry it to the total, which no entry passes.
    target = torch.minimum(shares[:, None] * total, total * (1 - 2**-52))
    # right=True passes over weights of 0, at a share of 0 as well. NaN passes over all.
    index = torch.searchsorted(cdf, target, right=True).clamp(max=weights.shape[-1] - 1)
    own = weights.gather(-1, index)
    left = (target - (cdf.gather(-1, index) - own)) / own
    return index.squeeze(-1), left.clamp(0, 1 - 2**-52).squeeze(-1)
