"""Random samples of ragged lengths, and their parts: properties hold whatever the order and the split."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightrft.ops.advantages import AdvantageInputs
from lightrft.ops.losses import PolicyLossInputs

TOKEN_FIELDS = ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "action_mask")


def advantage_inputs(seed: int, dtype: torch.dtype = torch.float64) -> AdvantageInputs:
    """Four groups of four samples, of 0 to 9 tokens; about a third of the tokens masked, with NaN behind the mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=dtype)

    lengths = torch.randint(0, 10, (16,), generator=generator).tolist()
    valid = torch.rand(16, generator=generator) > 0.2
    counts = torch.tensor(lengths)
    mask = (torch.rand(sum(lengths), generator=generator) > 0.3) & valid.repeat_interleave(counts)
    kl, values = normal(sum(lengths)), normal(sum(lengths))
    kl[~mask] = values[~mask] = math.nan
    scores = torch.where(valid, normal(16), math.nan)
    return AdvantageInputs(
        scores=scores,
        groups=torch.arange(4).repeat_interleave(4),
        valid=valid,
        action_mask=mask,
        lengths=lengths,
        kl=kl,
        kl_coef=0.1,
        values=values,
        bootstrap_values=normal(16),
        gamma=0.97,
        lambd=0.9,
        greedy_scores=normal(4).repeat_interleave(4),
    )


def take_samples(inputs: AdvantageInputs, order: Sequence[int]) -> AdvantageInputs:
    """The samples in `order`; all of them, or some."""
    order = list(order)
    assert inputs.kl is not None and inputs.values is not None
    assert inputs.bootstrap_values is not None and inputs.greedy_scores is not None
    return replace(
        inputs,
        scores=inputs.scores[order],
        groups=inputs.groups[order],
        valid=inputs.valid[order],
        action_mask=take_tokens(inputs.action_mask, inputs.lengths, order),
        lengths=[inputs.lengths[i] for i in order],
        kl=take_tokens(inputs.kl, inputs.lengths, order),
        values=take_tokens(inputs.values, inputs.lengths, order),
        bootstrap_values=inputs.bootstrap_values[order],
        greedy_scores=inputs.greedy_scores[order],
    )


def take_tokens(flat: Tensor, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
    """The tokens of the samples in `order`."""
    parts = flat.split(list(lengths))
    return torch.cat([parts[i] for i in order])


def loss_inputs(seed: int, num_samples: int = 12, spread: float = 0.4) -> PolicyLossInputs:
    """Samples of 1 to 9 tokens with one advantage each; a third of the tokens masked, and one whole sample."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 10, (num_samples,), generator=generator).tolist()
    total = sum(lengths)
    counts = torch.tensor(lengths)
    advantages = torch.randn(num_samples, generator=generator, dtype=torch.float64).repeat_interleave(counts)
    mask = torch.rand(total, generator=generator) > 0.3
    mask[: lengths[0]] = False

    def near(log_probs: Tensor) -> Tensor:
        return log_probs + spread * torch.randn(total, generator=generator, dtype=torch.float64)

    old_log_probs = -torch.rand(total, generator=generator, dtype=torch.float64)
    return PolicyLossInputs(
        log_probs=torch.where(mask, near(old_log_probs), 0.0).requires_grad_(),
        old_log_probs=torch.where(mask, old_log_probs, 0.0),
        rollout_log_probs=torch.where(mask, near(old_log_probs), 0.0),
        advantages=torch.where(mask, advantages, 0.0),
        action_mask=mask,
        lengths=lengths,
        eps_low=0.2,
        eps_high=0.28,
    )


def take_loss_samples(inputs: PolicyLossInputs, order: Sequence[int]) -> PolicyLossInputs:
    """The samples in `order`; all of them, or some."""
    taken = {name: take_tokens(getattr(inputs, name), inputs.lengths, order) for name in TOKEN_FIELDS}
    return replace(inputs, lengths=[inputs.lengths[i] for i in order], **taken)
