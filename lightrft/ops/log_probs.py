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
    `weight`. A target outside of the vocabulary has the log-probability NaN.

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

    def parts(self, target_ids: Int[Tensor, "tokens"], chunk_size: int) -> Iterator["_Part"]:
        """The vocabulary in parts. They are those of both passes, whose logits are then the same to the bit."""
        vocabulary = width = len(self.weight)
        if len(target_ids) > chunk_size:
            width = max(vocabulary * chunk_size // len(target_ids) // ALIGNMENT, 1) * ALIGNMENT
        columns = target_ids.remainder(width)[:, None]
        parts = target_ids.div(width, rounding_mode="floor").masked_fill_(target_ids >= vocabulary, -1)
        for k, start in enumerate(range(0, vocabulary, width)):
            rest = vocabulary - start
            inside = columns if width <= rest else columns.clamp(max=rest - 1)
            yield _Part(slice(start, start + width), inside, parts == k)

    def logits(self, hidden: Float[Tensor, "tokens hidden"], rows: slice) -> Float32[Tensor, "tokens part"]:
        logits = F.linear(hidden, self.weight[rows], None if self.bias is None else self.bias[rows]).float()
        if self.temperature != 1:
            logits.div_(self.temperature)
        return logits if self.suppressed is None else logits.add_(self.suppressed[rows])

    def finite(self, values: Float32[Tensor, "tokens part"], rows: slice) -> Float32[Tensor, "tokens part"]:
        """In place. What is suppressed has the probability 0, and 0 * -inf would be NaN."""
        return values if self.suppressed is None else values.masked_fill_(self.suppressed[rows] < 0, 0.0)


class _Part(NamedTuple):
    rows: slice
    """Of the weight."""
    columns: Int[Tensor, "tokens 1"]
    """Of each token's target in the part's logits, or any one where the target is elsewhere."""
    has_target: Bool[Tensor, "tokens"]


class _Kept(NamedTuple):
    """What the backward pass needs of each token."""

    tops: Float32[Tensor, "tokens"]
    """Largest logits."""
    sums: Float32[Tensor, "tokens"]
    """Of exp(logit - top). Apart from the top, so that 1 - p of a likely token keeps its digits."""
    entropies: Float32[Tensor, "tokens"] | None
    """Where they carry a gradient."""


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
            suppressed = torch.zeros(len(weight), dtype=torch.float32, device=weight.device)
            suppressed.index_fill_(0, suppressed_ids, float("-inf"))
        head = _Head(weight, bias, temperature, suppressed)
        log_probs, entropies, tops, sums = _scored(head, hidden, target_ids, chunk_size)
        kept = _Kept(tops, sums, entropies if with_entropy_grad else None)
        ctx.save_for_backward(hidden, weight, bias, target_ids, suppressed, *kept)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        if not with_entropy_grad:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_grads: Tensor, entropy_grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_ids, suppressed, *per_token = ctx.saved_tensors
        head, kept = _Head(weight, bias, ctx.temperature, suppressed), _Kept(*per_token)
        hidden_learns, weight_learns, bias_learns, *_ = ctx.needs_input_grad
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32) if hidden_learns else None
        weight_grad = torch.empty_like(weight) if weight_learns else None
        bias_grad = torch.empty_like(bias) if bias_learns else None
        log_prob_grads, entropy_grads = log_prob_grads / ctx.temperature, entropy_grads / ctx.temperature
        for part in head.parts(target_ids, ctx.chunk_size):
            logit_grads = _logit_grads(head, hidden, target_ids, part, kept, log_prob_grads, entropy_grads)
            if bias_grad is not None:
                bias_grad[part.rows] = logit_grads.sum(0)
            logit_grads = logit_grads.to(hidden.dtype)
            if hidden_grad is not None:
                hidden_grad += logit_grads @ weight[part.rows]
            if weight_grad is not None:
                torch.mm(logit_grads.T, hidden, out=weight_grad[part.rows])
            del logit_grads
        hidden_grad = None if hidden_grad is None else hidden_grad.to(hidden.dtype)
        return hidden_grad, weight_grad, bias_grad, None, None, None, None, None


def _scored(
    head: _Head, hidden: Float[Tensor, "tokens hidden"], target_ids: Int[Tensor, "tokens"], chunk_size: int
) -> tuple[Float32[Tensor, "tokens"], ...]:
    """Log-probs, entropies, largest logits and sums, by one pass with sums relative to the largest logit so far."""
    # Half of it, so that the distance to another logit is finite.
    tops = torch.full_like(target_ids, torch.finfo(torch.float32).min / 2, dtype=torch.float32)
    sums, products, at_target = torch.zeros_like(tops), torch.zeros_like(tops), torch.full_like(tops, float("nan"))
    for part in head.parts(target_ids, chunk_size):
        logits = head.logits(hidden, part.rows)
        at_target = torch.where(part.has_target, logits.gather(-1, part.columns).squeeze(-1), at_target)
        earlier_tops, tops = tops, torch.maximum(tops, logits.amax(-1))
        shift = earlier_tops - tops
        shrink = shift.exp()
        logits.sub_(tops[:, None])
        exps = logits.exp()
        earlier_products = torch.addcmul(products, shift, sums)
        sums = torch.addcmul(exps.sum(-1), sums, shrink)
        products = torch.addcmul(exps.mul_(head.finite(logits, part.rows)).sum(-1), earlier_products, shrink)
        del logits, exps
    log_sums = sums.log()
    return at_target - tops - log_sums, log_sums - products / sums, tops, sums


def _logit_grads(
    head: _Head,
    hidden: Float[Tensor, "tokens hidden"],
    target_ids: Int[Tensor, "tokens"],
    part: _Part,
    kept: _Kept,
    log_prob_grads: Float32[Tensor, "tokens"],
    entropy_grads: Float32[Tensor, "tokens"],
) -> Float32[Tensor, "tokens part"]:
    """d log p_t / d z_i = [i = t] - p_i, and d H / d z_i = -p_i (log p_i + H); both are divided by the temperature."""
    relative = head.logits(hidden, part.rows).sub_(kept.tops[:, None])
    of_exps = (log_prob_grads / -kept.sums)[:, None]
    if kept.entropies is None:
        logit_grads = relative.exp_().mul_(of_exps)
    else:
        logit_grads = relative.exp()
        log_prob_and_entropy = head.finite(relative, part.rows).add_((kept.entropies - kept.sums.log())[:, None])
        logit_grads.mul_(log_prob_and_entropy.mul_((entropy_grads / -kept.sums)[:, None]).add_(of_exps))
    of_target = log_prob_grads * part.has_target
    if head.suppressed is not None:
        of_target.masked_fill_(head.suppressed[target_ids] < 0, 0.0)
    return logit_grads.scatter_add_(-1, part.columns, of_target[:, None])
