from typing import get_args

import pytest
import torch

from lightrft.config.arguments import KLEstimator
from lightrft.ops.kl import KL_ESTIMATORS

POLICY_LOGITS = [0.3, -0.7, 1.1]
BASE_LOGITS = [-0.2, 0.5, 0.4]


def expected_gradient(name: str) -> torch.Tensor:
    """Of the estimator as a loss, over the policy's own samples, by enumeration of three actions."""
    logits = torch.tensor(POLICY_LOGITS, dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, dim=0)
    base_log_probs = torch.log_softmax(torch.tensor(BASE_LOGITS, dtype=torch.float64), dim=0)
    sampling_probs = log_probs.detach().exp()
    (sampling_probs * KL_ESTIMATORS[name](log_probs, base_log_probs)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def exact_gradient() -> torch.Tensor:
    logits = torch.tensor(POLICY_LOGITS, dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, dim=0)
    base_log_probs = torch.log_softmax(torch.tensor(BASE_LOGITS, dtype=torch.float64), dim=0)
    (log_probs.exp() * (log_probs - base_log_probs)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_estimators_are_those_that_the_config_names():
    assert set(KL_ESTIMATORS) == set(get_args(KLEstimator))


# log pi - log ref = 0.5; 0.5^2 / 2; exp(-0.5) - 1 + 0.5
@pytest.mark.parametrize(("name", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065)])
def test_estimates_of_a_log_ratio_of_one_half(name, expected):
    """NUM-10."""
    kl = KL_ESTIMATORS[name](torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert kl.item() == pytest.approx(expected, abs=1e-4)


def test_expected_gradient_of_k2_is_that_of_the_kl_and_k1_has_none():
    """NUM-11."""
    assert exact_gradient().abs().max() > 0.1
    torch.testing.assert_close(expected_gradient("k2"), exact_gradient(), rtol=0, atol=1e-12)
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


def test_k1_and_k3_are_unbiased():
    log_probs = torch.log_softmax(torch.tensor(POLICY_LOGITS, dtype=torch.float64), dim=0)
    base_log_probs = torch.log_softmax(torch.tensor(BASE_LOGITS, dtype=torch.float64), dim=0)
    exact = (log_probs.exp() * (log_probs - base_log_probs)).sum()
    for name in ("k1", "k3"):
        estimate = (log_probs.exp() * KL_ESTIMATORS[name](log_probs, base_log_probs)).sum()
        assert estimate.item() == pytest.approx(exact.item(), abs=1e-12)


def test_k3_of_nearly_equal_policies_is_not_negative_in_fp32():
    log_probs = -torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 5
    base_log_probs = log_probs + 1e-3 * torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    assert KL_ESTIMATORS["k3"](log_probs, base_log_probs).min() >= 0
