"""Corrections: weights for tokens that the engine drew with other probabilities than the actor gives them.

An engine's kernels and precision are not the trainer's, so a response comes from a policy next to the one that learns.
Each correction gives a weight of 0 or more a token, without gradient, from the importance ratio w: the probability that
the actor gives the token over that of the engine. A weight multiplies the token's advantage, and so its loss: a policy
loss is homogeneous in advantages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightrft.ops.segments import segment_ids, segment_sum, zero_masked


@dataclass(frozen=True)
class CorrectionInputs:
    """What any correction may read."""

    old_log_probs: Float[Tensor, "tokens"]
    rollout_log_probs: Float[Tensor, "tokens"]
    action_mask: Bool[Tensor, "tokens"]
    lengths: Sequence[int]
    low: float
    """`--correction_low`."""
    high: float
    """`--correction_high`."""

    @property
    def token_ratios(self) -> Float[Tensor, "tokens"]:
        return torch.exp(self._log_ratios)

    @property
    def sample_ratios(self) -> Float[Tensor, "tokens"]:
        """At each token, the product over the kept tokens of its sample."""
        sums = segment_sum(self._log_ratios, self.lengths)
        return torch.exp(sums)[segment_ids(self.lengths, sums.device)]

    @property
    def _log_ratios(self) -> Float[Tensor, "tokens"]:
        return zero_masked(self.old_log_probs - self.rollout_log_probs, self.action_mask)


def tis(inputs: CorrectionInputs) -> Float[Tensor, "tokens"]:
    """Truncated importance sampling: a token's ratio, cut off at `high`.

    Formula: min(w_t, high)

    Source: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    return inputs.token_ratios.clamp(max=inputs.high)


def sequence_tis(inputs: CorrectionInputs) -> Float[Tensor, "tokens"]:
    """Truncated importance sampling of whole samples: the product of their tokens' ratios, cut off at `high`.

    Formula: min(product over t of w_t, high)

    Source: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (2025).
    """
    return inputs.sample_ratios.clamp(max=inputs.high)


def mis(inputs: CorrectionInputs) -> Float[Tensor, "tokens"]:
    """Masked importance sampling: a token's ratio, and 0 where it is over `high`.

    Formula: w_t where w_t <= high, else 0

    Source: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (2025).
    """
    ratios = inputs.token_ratios
    return torch.where(ratios <= inputs.high, ratios, 0.0)


def sequence_mis(inputs: CorrectionInputs) -> Float[Tensor, "tokens"]:
    """Masked importance sampling of whole samples: a sample whose ratio is over `high` is left out.

    Formula: w where w = product over t of w_t <= high, else 0

    Source: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (2025).
    """
    ratios = inputs.sample_ratios
    return torch.where(ratios <= inputs.high, ratios, 0.0)


def icepop(inputs: CorrectionInputs) -> Float[Tensor, "tokens"]:
    """A token's ratio, and 0 where engine and actor disagree too far in either direction.

    Formula: w_t where low <= w_t <= high, else 0

    Source: Ling team, "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop!" (2025).
    """
    ratios = inputs.token_ratios
    return torch.where((ratios >= inputs.low) & (ratios <= inputs.high), ratios, 0.0)


CORRECTIONS: dict[str, Callable[[CorrectionInputs], Float[Tensor, "tokens"]]] = {
    "tis": tis,
    "sequence_tis": sequence_tis,
    "mis": mis,
    "sequence_mis": sequence_mis,
    "icepop": icepop,
}
"""`inputs -> (N,)` by the name that `--rollout_correction` takes."""
