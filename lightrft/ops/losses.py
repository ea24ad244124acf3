"""Losses of policy and critic, by token."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lightrft.ops.segments import segment_ids, segment_mean


@dataclass(frozen=True)
class PolicyLossInputs:
    """What any policy loss may read of a micro-batch: the response tokens of whole samples, one after the other."""

    log_probs: Float[Tensor, "tokens"]
    """Of the policy that learns: the one input with a gradient."""
    old_log_probs: Float[Tensor, "tokens"]
    """Of the policy that sampled, scored by the actor. All log-probs are 0 at masked tokens."""
    rollout_log_probs: Float[Tensor, "tokens"] | None
    """The same, as the engine saw them. None where it does not say them."""
    advantages: Float[Tensor, "tokens"]
    action_mask: Bool[Tensor, "tokens"]
    """False = the token's loss is not read; it must be finite all the same. A whole sample may be masked."""
    lengths: Sequence[int]
    eps_low: float
    eps_high: float
    dual_clip: float | None = None
    """`--dual_clip`, above 1. None does not clip a second time."""
    tau_positive: float = 1.0
    """`--sapo_tau_pos`."""
    tau_negative: float = 1.05
    """`--sapo_tau_neg`."""
    drift_coef: float = 0.0
    """`--policy_drift_coef`."""


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of each token, and where clipping cuts its gradient off."""

    losses: Float[Tensor, "tokens"]
    clipped_low: Bool[Tensor, "tokens"] | None = None
    """The ratio is under `1 - eps_low` and the advantage is negative. None for a loss that does not clip."""
    clipped_high: Bool[Tensor, "tokens"] | None = None
    """The ratio is over `1 + eps_high` and the advantage is positive. None for a loss that does not clip."""
    clipped_dual: Bool[Tensor, "tokens"] | None = None
    """The ratio is over `dual_clip` and the advantage is negative. None without a second clip."""


def ppo_clip(inputs: PolicyLossInputs) -> PolicyLoss:
    """`ppo_clip_loss` of a micro-batch: PPO's clipped surrogate, with a clip range each way.

    Formula: -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), with r = pi / pi_old; with dual_clip c and A < 0 at most
    -c A

    Source: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7; two epsilons: Yu et al., "DAPO"
    (2025), eq. 10; dual clip: Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning"
    (2020).
    """
    return ppo_clip_loss(
        inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.eps_low, inputs.eps_high, inputs.dual_clip
    )


def ppo_clip_loss(
    log_probs: Float[Tensor, "tokens"],
    old_log_probs: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """Clipped surrogate, as a loss: the ratio gains nothing outside `1 - eps_low .. 1 + eps_high`.

    Args:
        dual_clip: At a negative advantage, a ratio above this costs no more than this one. None for any cost.

    Source: that of `ppo_clip`.
    """
    return _clipped(torch.exp(log_probs - old_log_probs), advantages, eps_low, eps_high, dual_clip)


def gspo(inputs: PolicyLossInputs) -> PolicyLoss:
    """One ratio a sample, the geometric mean of its tokens' ratios, clipped as PPO clips; it wants epsilons near 3e-4.

    Each token has its sample's loss, and in the mean over a sample's tokens the gradient of eq. 5; where advantages
    differ within a sample, that of GSPO-token.

    Formula: -min(s A, clip(s, 1 - eps_low, 1 + eps_high) A), with s = exp(mean over tokens of log pi - log pi_old)

    Source: Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 5 and 7; by token: eq. 13 and 14.
    """
    log_ratio = _sample_mean(inputs.log_probs - inputs.old_log_probs, inputs).detach()
    # The value of the sample's ratio, and of the token's log-probability the gradient.
    ratio = torch.exp(log_ratio + inputs.log_probs - inputs.log_probs.detach())
    return _clipped(ratio, inputs.advantages, inputs.eps_low, inputs.eps_high, inputs.dual_clip)


def gmpo(inputs: PolicyLossInputs) -> PolicyLoss:
    """The geometric mean of a sample's ratios, each clipped before: an outlier among tokens hardly counts.

    The epsilons are of the logarithm: 0.4 clips to exp(-0.4) .. exp(0.4), which the paper takes.

    Formula: -A exp(mean over tokens of sgn(A) min(sgn(A) l, sgn(A) clip(l, -eps_low, eps_high))), with
    l = log pi - log pi_old

    Source: Zhao et al., "Geometric-Mean Policy Optimization" (2025), section 3.
    """
    log_ratio = inputs.log_probs - inputs.old_log_probs
    sign = inputs.advantages.sign()
    clipped = torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-inputs.eps_low, inputs.eps_high))
    ratio = torch.exp(_sample_mean(sign * clipped, inputs))
    return PolicyLoss(
        losses=-inputs.advantages * ratio,
        clipped_low=(log_ratio < -inputs.eps_low) & (inputs.advantages < 0),
        clipped_high=(log_ratio > inputs.eps_high) & (inputs.advantages > 0),
    )


def cpgd(inputs: PolicyLossInputs) -> PolicyLoss:
    """A policy gradient that ends where PPO's would, without a ratio that could amplify it, and a pull back.

    The pull, policy drift, is k3 of the KL divergence from the old policy, weighed by --policy_drift_coef.

    Formula: -min(l A, clip(l, log(1 - eps_low), log(1 + eps_high)) A) + drift_coef (r - 1 - l), with
    l = log r = log pi - log pi_old

    Source: Liu et al., "CPGD: Toward Stable Rule-based Reinforcement Learning for Language Models" (2025), with the
    drift by tokens.
    """
    log_ratio = inputs.log_probs - inputs.old_log_probs
    lowest = math.log1p(-inputs.eps_low) if inputs.eps_low < 1 else -math.inf
    clipped = log_ratio.clamp(lowest, math.log1p(inputs.eps_high))
    losses = -torch.minimum(log_ratio * inputs.advantages, clipped * inputs.advantages)
    if inputs.drift_coef:
        losses = losses + inputs.drift_coef * (torch.expm1(log_ratio) - log_ratio)
    return PolicyLoss(
        losses=losses,
        clipped_low=(log_ratio < lowest) & (inputs.advantages < 0),
        clipped_high=(log_ratio > math.log1p(inputs.eps_high)) & (inputs.advantages > 0),
    )


def cispo(inputs: PolicyLossInputs) -> PolicyLoss:
    """A policy gradient weighed by the clipped ratio: no token loses its gradient. eps_low of 1 has no lower bound.

    Its clipped tokens are those whose weight is cut.

    Formula: -sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi, with r = pi / pi_old and sg without gradient

    Source: MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention" (2025), eq. 4 and 5.
    """
    ratio = torch.exp(inputs.log_probs.detach() - inputs.old_log_probs)
    return PolicyLoss(
        losses=-ratio.clamp(1.0 - inputs.eps_low, 1.0 + inputs.eps_high) * inputs.advantages * inputs.log_probs,
        clipped_low=ratio < 1.0 - inputs.eps_low,
        clipped_high=ratio > 1.0 + inputs.eps_high,
    )


def sapo(inputs: PolicyLossInputs) -> PolicyLoss:
    """A gate that closes softly where PPO clips: its slope is 1 on-policy, and falls on both sides.

    Formula: -4 / tau sigmoid(tau (r - 1)) A, with r = pi / pi_old, tau_pos where A > 0 and tau_neg elsewhere

    Source: Gao et al., "Soft Adaptive Policy Optimization" (2025), section 3.
    """
    ratio = torch.exp(inputs.log_probs - inputs.old_log_probs)
    positive, negative = ratio.new_tensor(inputs.tau_positive), ratio.new_tensor(inputs.tau_negative)
    tau = torch.where(inputs.advantages > 0, positive, negative)
    return PolicyLoss(losses=-4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * inputs.advantages)


def policy_gradient(inputs: PolicyLossInputs) -> PolicyLoss:
    """The plain policy gradient: right while the policy is that which sampled, so for one update a rollout.

    Formula: -A log pi

    Source: Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning"
    (1992), section 5.
    """
    return PolicyLoss(losses=-inputs.advantages * inputs.log_probs)


def _clipped(
    ratio: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """`-min(ratio A, clip(ratio) A)`, with the second clip where asked for."""
    clipped_ratio = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    losses = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    is_negative = advantages < 0
    clipped_dual = None
    if dual_clip is not None:
        losses = torch.where(is_negative, torch.minimum(losses, -dual_clip * advantages), losses)
        clipped_dual = (ratio > dual_clip) & is_negative
    return PolicyLoss(
        losses=losses,
        clipped_low=(ratio < 1.0 - eps_low) & is_negative,
        clipped_high=(ratio > 1.0 + eps_high) & (advantages > 0),
        clipped_dual=clipped_dual,
    )


def _sample_mean(values: Float[Tensor, "tokens"], inputs: PolicyLossInputs) -> Float[Tensor, "tokens"]:
    """At each token, the mean over the kept tokens of its sample."""
    means = segment_mean(values, inputs.action_mask, inputs.lengths)
    return means[segment_ids(inputs.lengths, values.device)]


POLICY_LOSSES: dict[str, Callable[[PolicyLossInputs], PolicyLoss]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gmpo": gmpo,
    "cpgd": cpgd,
    "cispo": cispo,
    "sapo": sapo,
    "policy_gradient": policy_gradient,
}
"""By the name that `--policy_loss` takes."""


def value_loss(
    values: Float[Tensor, "tokens"],
    old_values: Float[Tensor, "tokens"],
    returns: Float[Tensor, "tokens"],
    clip: float,
) -> Float[Tensor, "tokens"]:
    """Half the squared error of the value, or of the value held within `clip` of its old one, whichever is larger.

    Args:
        clip: 0 does not clip.

    Source: Engstrom et al., "Implementation Matters in Deep Policy Gradients" (2020), section 3, item 1.
    """
    squared_errors = (values - returns).square()
    if clip == 0:
        return 0.5 * squared_errors
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(squared_errors, (clipped_values - returns).square())
