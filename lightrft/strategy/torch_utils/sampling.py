"""Sampling: token ids from logits and keyed uniform numbers, and their log-probabilities."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.utils.sampling_key import GOLDEN, MIXERS


def keyed_uniforms(seeds: Sequence[int], num_draws: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 `(B, num_draws)`: entry (i, j) depends on `seeds[i]` and j alone."""
    keys = torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64)
    return uniforms_at(keys[:, None], torch.arange(num_draws))


def uniforms_at(keys: Tensor, draws: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64: each depends on its key, an int64, and on the number of its draw alone.

    A counter-based generator: splitmix64 whose state starts at the mixed key. Integer arithmetic that wraps around
    gives the same bits on every platform and device.
    """
    return uniforms_from(_mix64(keys), draws)


def uniforms_from(mixed_keys: Tensor, draws: Tensor) -> Tensor:
    """`uniforms_at` of keys that went through `mix64` already."""
    states = torch.add(mixed_keys + _signed(GOLDEN), draws, alpha=_signed(GOLDEN))
    return _logical_shift_right(_mix64(states), 11).double() * 2.0**-53


def sample_tokens(
    logits: Tensor, uniforms: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> Tensor:
    """Token ids `(B,)` by inverse CDF over the vocabulary's order, in float64; temperature 0 takes the likeliest.

    Top-k filters first, then top-p on what is left, as in vLLM and transformers.

    Args:
        logits: `(B, V)`.
        uniforms: `(B,)` in [0, 1).
    """
    if temperature == 0:
        return logits.argmax(-1)
    weights = logits.double()
    # In place: a float64 copy of the logits is the largest tensor of a decode step.
    weights.sub_(weights.amax(-1, keepdim=True)).div_(temperature).exp_()
    if top_k > 0 or top_p < 1:
        weights = _filtered(weights, top_p, top_k)
    cdf = weights.cumsum_(-1)
    # The last entry normalises. right=True passes over tokens of probability 0, at u = 0 as well.
    ids = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    return ids.clamp(max=logits.shape[-1] - 1)


def token_log_probs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of `ids` over the full vocabulary at the sampling temperature, fp32 `(B,)`.

    Top-p and top-k do not enter: the trainer scores the full vocabulary too. Greedy tokens are scored at temperature 1.
    """
    scaled = logits.float() if temperature in (0, 1) else logits.float() / temperature
    return scaled.gather(-1, ids[:, None]).squeeze(-1) - scaled.logsumexp(-1)


def _filtered(weights: Tensor, top_p: float, top_k: int) -> Tensor:
    """`weights`, in proportion to probabilities, with 0 where the filters cut."""
    if top_k > 0:
        kept, ids = weights.topk(min(top_k, weights.shape[-1]), sorted=True)
    else:
        kept, ids = weights.sort(descending=True, stable=True)
    if top_p < 1:
        before = kept.cumsum(-1) - kept
        kept = kept.masked_fill(before >= top_p * kept.sum(-1, keepdim=True), 0.0)
    return torch.zeros_like(weights).scatter(-1, ids, kept)


def _mix64(values: Tensor) -> Tensor:
    """`sampling_key.mix64` on int64 tensors."""
    values = (values ^ _logical_shift_right(values, 30)) * _signed(MIXERS[0])
    values = (values ^ _logical_shift_right(values, 27)) * _signed(MIXERS[1])
    return values ^ _logical_shift_right(values, 31)


def _logical_shift_right(values: Tensor, bits: int) -> Tensor:
    # >> on int64 copies the sign bit in from the left; the mask takes it out again.
    return (values >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of `value` modulo 2**64."""
    return (value + 2**63) % 2**64 - 2**63
