"""Log-probabilities of tokens, fused with the language-model head so that few logits exist at a time."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def token_log_probs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    target_ids: Int[Tensor, "tokens"],
    temperature: float,
    chunk_size: int,
    bias: Float[Tensor, "vocabulary"] | None = None,
    with_entropy_grad: bool = False,
    suppressed_ids: Int[Tensor, "suppressed"] | None = None,
) -> tuple[Float32[Tensor, "tokens"], Float32[Tensor, "tokens"]]:
    """Natural log-probabilities of the targets, and entropies in nats, of softmax(logits / temperature).

    Logits are made in the dtype of `hidden` and `weight`, everything after them in fp32. The logits of `chunk_size`
    tokens exist at a time, in the forward and, recomputed, in the backward pass. The values are the same to the bit
    with and without gradients. No token at all gives empty results whose backward pass reaches `hidden` and `weight`.

    Args:
        with_entropy_grad: Whether the entropies carry a gradient.
        suppressed_ids: Their logits count as -inf.
    """
    assert temperature > 0, temperature
    chunk_log_probs: Callable[..., tuple[Tensor, Tensor]] = _chunk_log_probs
    if torch.is_grad_enabled():
        chunk_log_probs = partial(checkpoint, _chunk_log_probs, use_reentrant=False, preserve_rng_state=False)
    # Splitting zero tokens gives one chunk of zero tokens, which keeps the graph connected.
    chunks = zip(hidden.split(chunk_size), target_ids.split(chunk_size), strict=True)
    parts = [
        chunk_log_probs(chunk, weight, bias, ids, temperature, with_entropy_grad, suppressed_ids)
        for chunk, ids in chunks
    ]
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies)


def _chunk_log_probs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, "vocabulary"] | None,
    target_ids: Int[Tensor, "tokens"],
    temperature: float,
    with_entropy_grad: bool,
    suppressed_ids: Int[Tensor, "suppressed"] | None,
) -> tuple[Float32[Tensor, "tokens"], Float32[Tensor, "tokens"]]:
    # One expression, so that the logits are freed before the entropy takes its scratch space.
    vocabulary_log_probs = torch.log_softmax(
        _suppressed(F.linear(hidden, weight, bias).float().div_(temperature), suppressed_ids, float("-inf")), dim=-1
    )
    log_probs = vocabulary_log_probs.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)
    # The entropy comes last: without a gradient, the recomputation in the backward pass stops before it.
    entropy_source = vocabulary_log_probs if with_entropy_grad else vocabulary_log_probs.detach()
    # 0 * -inf would be NaN, in the entropy and in its gradient.
    finite = _suppressed(entropy_source, suppressed_ids, 0.0)
    entropy = -(entropy_source.exp() * finite).sum(-1)
    return log_probs, entropy


def _suppressed(
    values: Float32[Tensor, "tokens vocabulary"], suppressed_ids: Int[Tensor, "suppressed"] | None, value: float
) -> Float32[Tensor, "tokens vocabulary"]:
    return values if suppressed_ids is None else values.index_fill(-1, suppressed_ids, value)
