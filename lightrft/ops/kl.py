"""Estimators of the KL divergence from the reference model, by token."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def k1_kl(log_probs: Float[Tensor, "tokens"], base_log_probs: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """Per-token estimate of KL(pi || pi_ref) in nats: unbiased, either sign. Its expected gradient is 0.

    Formula: log pi - log pi_ref

    Source: J. Schulman, "Approximating KL Divergence" (2020), estimator k1.
    """
    return log_probs - base_log_probs


def k2_kl(log_probs: Float[Tensor, "tokens"], base_log_probs: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """Per-token estimate of KL(pi || pi_ref) in nats: biased, never negative. Its expected gradient is that of the KL.

    Formula: (log pi - log pi_ref)^2 / 2

    Source: J. Schulman, "Approximating KL Divergence" (2020), estimator k2.
    """
    return 0.5 * (log_probs - base_log_probs).square()


def k3_kl(log_probs: Float[Tensor, "tokens"], base_log_probs: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """Per-token estimate of KL(pi || pi_ref) in nats: unbiased, never negative.

    Formula: r - 1 - log r, with r = pi_ref / pi

    Source: J. Schulman, "Approximating KL Divergence" (2020), estimator k3.
    """
    log_ratio = base_log_probs - log_probs
    return torch.expm1(log_ratio) - log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl}
"""`(log_probs (N,), base_log_probs (N,)) -> (N,)` by the name that `--kl_estimator` takes."""
