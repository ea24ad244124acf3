"""Log-probabilities of tokens, fused with the language-model head so that few logits exist at a time."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

ALIGNMENT = 64
"""Columns that parts of a vocabulary have a multiple of, but for the last: matrix products are fast with it."""


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

    Logits are made in the dtype of `hidden` and `weight`, everything after them in fp32. Those of all tokens for a part
    of the vocabulary exist at a time, twice in fp32: as many as `chunk_size` tokens have over all of it, or for 64 of
    its columns where these are more. The backward pass makes them again, and has no derivative. The values are the same
    to the bit with and without gradients. No token at all gives empty results whose backward pass reaches `hidden` and
    `weight`.

    Args:
        with_entropy_grad: Whether the entropies carry a gradient.
        suppressed_ids: Their logits count as -inf.
    """
    assert temperature > 0, temperature
    return _TokenLogProbs.apply(
        hidden, weight, bias, target_ids, temperature, chunk_size, with_entropy_grad, suppressed_ids
    )


class _Head(NamedTuple):
    weight: Float[Tensor, "vocabulary hidden"]
    bias: Float[Tensor, "vocabulary"] | None
    temperature: float
    suppressed: Float32[Tensor, "vocabulary"] | None
    """-inf for suppressed ids, 0 for others."""

    def parts(self, num_tokens: int, chunk_size: int) -> Iterator[slice]:
        """The vocabulary in parts. They are those of both passes, whose logits are then the same to the bit."""
        vocabulary = width = len(self.weight)
        if num_tokens > chunk_size:
            width = max(vocabulary * chunk_size // num_tokens // ALIGNMENT, 1) * ALIGNMENT
        return (slice(start, start + width) for start in range(0, vocabulary, width))

    def logits(self, hidden: Float[Tensor, "tokens hidden"], part: slice) -> Float32[Tensor, "tokens part"]:
        logits = F.linear(hidden, self.weight[part], None if self.bias is None else self.bias[part]).float()
        if self.temperature != 1:
            logits.div_(self.temperature)
        return logits if self.suppressed is None else logits.add_(self.suppressed[part])

    def finite(self, values: Float32[Tensor, "tokens part"], part: slice) -> Float32[Tensor, "tokens part"]:
        """In place. What is suppressed has the probability 0, and 0 * -inf would be NaN."""
        return values if self.suppressed is None else values.masked_fill_(self.suppressed[part] < 0, 0.0)


class _Kept(NamedTuple):
    """What the backward pass needs of each token."""

    tops: Float32[Tensor, "tokens"]
    """Largest logits."""
    sums: Float32[Tensor, "tokens"]
    """Of exp(logit - top). Apart from the top, so that 1 - p of a likely token keeps its digits."""
    entropies: Float32[Tensor, "tokens"]


class _TokenLogProbs(torch.autograd.Function):
    """By parts of the vocabulary, so that each writes its own rows of the weight's gradient, once.

    By chunks of tokens each chunk would add to the whole gradient: in bf16 a rounding each, and more bytes than the
    logits have. What all parts add to is the gradient of `hidden`, which is small, and fp32 meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        temperature: float,
        chunk_size: int,
        with_entropy_grad: bool,
        suppressed_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        suppressed = None
        if suppressed_ids is not None:
            suppressed = torch.zeros(len(weight), device=weight.device).index_fill_(0, suppressed_ids, float("-inf"))
        log_probs, kept = _scored(_Head(weight, bias, temperature, suppressed), hidden, target_ids, chunk_size)
        ctx.save_for_backward(hidden, weight, bias, target_ids, suppressed, *kept)
        ctx.temperature, ctx.chunk_size, ctx.with_entropy_grad = temperature, chunk_size, with_entropy_grad
        if not with_entropy_grad:
            ctx.mark_non_differentiable(kept.entropies)
        return log_probs, kept.entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_grads: Tensor, entropy_grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_ids, suppressed, *per_token = ctx.saved_tensors
        head, kept = _Head(weight, bias, ctx.temperature, suppressed), _Kept(*per_token)
        hidden_learns, weight_learns, bias_learns, *_ = ctx.needs_input_grad
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32) if hidden_learns else None
        weight_grad = torch.empty_like(weight) if weight_learns else None
        bias_grad = torch.empty_like(bias) if bias_learns else None
        grads = log_prob_grads / ctx.temperature, entropy_grads / ctx.temperature if ctx.with_entropy_grad else None
        for part in head.parts(len(hidden), ctx.chunk_size):
            logit_grads = _logit_grads(head, hidden, target_ids, part, kept, *grads)
            if bias_grad is not None:
                bias_grad[part] = logit_grads.sum(0)
            logit_grads = logit_grads.to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad += logit_grads @ weight[part]
            if weight_grad is not None:
                torch.mm(logit_grads.T, hidden, out=weight_grad[part])
            del logit_grads
        hidden_grad = None if hidden_grad is None else hidden_grad.to(hidden.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None, None, None


def _scored(
    head: _Head, hidden: Float[Tensor, "tokens hidden"], target_ids: Int[Tensor, "tokens"], chunk_size: int
) -> tuple[Float32[Tensor, "tokens"], _Kept]:
    """Log-probs, by one pass over the parts, with sums that are relative to the largest logit so far."""
    tops = torch.full_like(target_ids, torch.finfo(torch.float32).min, dtype=torch.float32)
    sums, products, at_target = torch.zeros(3, len(tops), device=tops.device)
    for part in head.parts(len(hidden), chunk_size):
        logits = head.logits(hidden, part)
        columns, is_inside = _columns(target_ids, part, logits.shape[1])
        at_target = torch.where(is_inside, logits.gather(-1, columns).squeeze(-1), at_target)
        earlier_tops, tops = tops, torch.maximum(tops, logits.amax(-1))
        shift = earlier_tops - tops
        shrink = shift.exp()
        logits.sub_(tops[:, None])
        exps = logits.exp()
        products = (products + shift * sums) * shrink
        sums = sums * shrink + exps.sum(-1)
        products += exps.mul_(head.finite(logits, part)).sum(-1)
        del logits, exps
    log_sums = sums.log()
    return at_target - tops - log_sums, _Kept(tops, sums, log_sums - products / sums)


def _logit_grads(
    head: _Head,
    hidden: Float[Tensor, "tokens hidden"],
    target_ids: Int[Tensor, "tokens"],
    part: slice,
    kept: _Kept,
    log_prob_grads: Float32[Tensor, "tokens"],
    entropy_grads: Float32[Tensor, "tokens"] | None,
) -> Float32[Tensor, "tokens part"]:
    """d log p_t / d z_i = [i = t] - p_i, and d H / d z_i = -p_i (log p_i + H); both are divided by the temperature."""
    relative = head.logits(hidden, part).sub_(kept.tops[:, None])
    of_exps = (log_prob_grads / -kept.sums)[:, None]
    if entropy_grads is None:
        logit_grads = relative.exp_().mul_(of_exps)
    else:
        logit_grads = relative.exp()
        log_prob_and_entropy = head.finite(relative, part).add_((kept.entropies - kept.sums.log())[:, None])
        logit_grads.mul_(log_prob_and_entropy.mul_((entropy_grads / -kept.sums)[:, None]).add_(of_exps))
    columns, is_inside = _columns(target_ids, part, logit_grads.shape[1])
    if head.suppressed is not None:
        is_inside &= head.suppressed[target_ids] == 0
    return logit_grads.scatter_add_(-1, columns, (log_prob_grads * is_inside)[:, None])


def _columns(
    target_ids: Int[Tensor, "tokens"], part: slice, width: int
) -> tuple[Int[Tensor, "tokens 1"], Bool[Tensor, "tokens"]]:
    """Targets' places in a part of the vocabulary, and whether they are there; some place where they are not."""
    places = target_ids - part.start
    columns = places.clamp(0, width - 1)
    return columns[:, None], places == columns
