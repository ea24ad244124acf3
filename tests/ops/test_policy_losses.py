import math
from dataclasses import replace

import pytest
import torch

from lightrft.ops.losses import POLICY_LOSSES, PolicyLoss, PolicyLossInputs
from tests.ops.ragged import loss_inputs, take_loss_samples, take_tokens

WITH_SETTINGS = {"dual_clip": 1.5, "tau_positive": 1.0, "tau_negative": 1.05, "drift_coef": 0.1}
"""Settings that `loss_inputs` leaves at their defaults, each of which some loss reads."""


def tokens(ratios: list[float], advantages: list[float], lengths: list[int] | None = None) -> PolicyLossInputs:
    """Tokens of an old probability of 1/2 and these ratios, all kept; one sample, or samples of these lengths."""
    old_log_probs = torch.full((len(ratios),), math.log(0.5), dtype=torch.float64)
    log_probs = old_log_probs + torch.tensor(ratios, dtype=torch.float64).log()
    return PolicyLossInputs(
        log_probs=log_probs.requires_grad_(),
        old_log_probs=old_log_probs,
        rollout_log_probs=None,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        action_mask=torch.ones(len(ratios), dtype=torch.bool),
        lengths=lengths or [len(ratios)],
        eps_low=0.2,
        eps_high=0.28,
    )


def gradient(name: str, inputs: PolicyLossInputs) -> list[float]:
    """Of the sum of the tokens' losses, by log-probability."""
    (result,) = torch.autograd.grad(POLICY_LOSSES[name](inputs).losses.sum(), inputs.log_probs)
    return result.tolist()


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "is_cut"),
    [
        (1.0, 1.5, -1.28, False),
        (-1.0, 0.5, 0.8, False),
        (-1.0, 5.0, 3.0, True),
        (1.0, 5.0, -1.28, False),
        (-1.0, 2.9, 2.9, False),
    ],
)
def test_dual_clip_bounds_what_a_negative_advantage_costs(advantage, ratio, loss, is_cut):
    """NUM-18: c = 3."""
    result = POLICY_LOSSES["ppo_clip"](replace(tokens([ratio], [advantage]), dual_clip=3.0))
    assert result.losses.item() == pytest.approx(loss)
    assert result.clipped_dual is not None and result.clipped_dual.item() == is_cut


@pytest.mark.parametrize("length", [2, 10])
def test_gspo_takes_the_ratio_of_the_mean_token(length):
    """NUM-12: a log-ratio of 0.1 a token is 1.1052 at any length; clipped once a sample."""
    inputs = tokens([math.exp(0.1)] * length, [1.0] * length)
    losses = POLICY_LOSSES["gspo"](inputs).losses.tolist()
    assert losses == pytest.approx([-1.1052] * length, abs=1e-4)
    clipped = POLICY_LOSSES["gspo"](replace(inputs, eps_high=0.05))
    assert clipped.losses.tolist() == pytest.approx([-1.05] * length)
    assert clipped.clipped_high is not None and clipped.clipped_high.all()


def test_gspo_clips_whole_samples():
    """Ratios 4 and 1 of one sample have the mean 2, over 1.28: neither token learns; alone the second would."""
    assert gradient("gspo", tokens([4.0, 1.0], [1.0, 1.0])) == [0.0, 0.0]
    assert gradient("gspo", tokens([4.0, 1.0], [1.0, 1.0], lengths=[1, 1])) == [0.0, -1.0]


def test_gspos_mean_over_a_sample_has_the_gradient_of_the_samples_objective():
    """Eq. 5: -A d exp(mean l) / dl_t = -A s / 3 at each of three tokens; ratios 1.1, 1, 1 have s = 1.1^(1/3)."""
    scale = 1.1 ** (1 / 3)
    mean_gradient = [value / 3 for value in gradient("gspo", tokens([1.1, 1.0, 1.0], [2.0] * 3))]
    assert mean_gradient == pytest.approx([-2.0 * scale / 3] * 3)


def test_gmpo_takes_the_geometric_mean_of_clipped_ratios():
    """eps 0.4: log-ratios 1.0 and 0.1 are cut to 0.4 and 0.1, mean 0.25; at a negative advantage the 1.0 stays."""
    ratios = [math.exp(1.0), math.exp(0.1)]
    good = replace(tokens(ratios, [2.0, 2.0]), eps_low=0.4, eps_high=0.4)
    bad = replace(tokens(ratios, [-2.0, -2.0]), eps_low=0.4, eps_high=0.4)
    assert POLICY_LOSSES["gmpo"](good).losses.tolist() == pytest.approx([-2 * math.exp(0.25)] * 2)
    assert POLICY_LOSSES["gmpo"](bad).losses.tolist() == pytest.approx([2 * math.exp(0.55)] * 2)
    # Both tokens' losses are the sample's; d(-2 exp(m)) / dl = -2 exp(m) / 2 for the token that is not cut.
    assert gradient("gmpo", good) == pytest.approx([0.0, -2 * math.exp(0.25)])


def test_cpgd_is_the_logarithm_of_ppos_ratio():
    """Good tokens gain up to log 1.28, bad ones lose down to log 0.8, with the gradient -A in between."""
    inputs = tokens([1.1, 2.0, 0.5, 2.0], [2.0, 1.0, -1.0, -1.0])
    expected = [-2 * math.log(1.1), -math.log(1.28), math.log(0.8), math.log(2.0)]
    result = POLICY_LOSSES["cpgd"](inputs)
    assert result.losses.tolist() == pytest.approx(expected)
    assert gradient("cpgd", inputs) == [-2.0, 0.0, 0.0, 1.0]
    assert result.clipped_high is not None and result.clipped_high.tolist() == [False, True, False, False]
    assert result.clipped_low is not None and result.clipped_low.tolist() == [False, False, True, False]


def test_cpgds_drift_pulls_back_by_the_ratio():
    """0.5 (r - 1 - log r) has the gradient 0.5 (r - 1): 0.5 at a ratio of 2, -0.25 at 1/2, 0 at 1."""
    inputs = replace(tokens([2.0, 0.5, 1.0], [0.0] * 3), drift_coef=0.5)
    expected = [0.5 * (1 - math.log(2.0)), 0.5 * (-0.5 + math.log(2.0)), 0.0]
    assert POLICY_LOSSES["cpgd"](inputs).losses.tolist() == pytest.approx(expected)
    assert gradient("cpgd", inputs) == pytest.approx([0.5, -0.25, 0.0])


def test_cispo_weighs_every_token_and_cuts_the_weight():
    """Weights 1.28, 0.8 and 1.1: the gradient is -weight A, also where PPO has none."""
    inputs = tokens([2.0, 0.5, 1.1], [1.0, -1.0, 2.0])
    result = POLICY_LOSSES["cispo"](inputs)
    expected = [-1.28 * math.log(1.0), 0.8 * math.log(0.25), -2.2 * math.log(0.55)]
    assert result.losses.tolist() == pytest.approx(expected)
    assert gradient("cispo", inputs) == pytest.approx([-1.28, 0.8, -2.2])
    assert result.clipped_high is not None and result.clipped_high.tolist() == [True, False, False]


def test_cispo_with_an_eps_low_of_one_has_no_lower_bound():
    assert gradient("cispo", replace(tokens([0.01], [-1.0]), eps_low=1.0)) == pytest.approx([0.01])


def test_sapos_gate_has_slope_one_on_policy_and_closes_softly():
    """On-policy -A 4 / tau / 2, and the gradient of the plain policy gradient, whatever tau is."""
    on_policy = tokens([1.0, 1.0], [1.0, -1.0])
    assert POLICY_LOSSES["sapo"](on_policy).losses.tolist() == pytest.approx([-2.0, 2.0 / 1.05])
    assert gradient("sapo", on_policy) == pytest.approx([-1.0, 1.0])
    # r = 3, tau = 1: 4 s (1 - s) r with s = sigmoid(2) = 0.8808
    assert gradient("sapo", tokens([3.0], [1.0])) == pytest.approx([-4 * 0.880797 * 0.119203 * 3], abs=1e-5)


def test_the_plain_policy_gradient_reads_no_old_policy():
    inputs = tokens([3.0, 0.2], [2.0, -1.0])
    assert gradient("policy_gradient", inputs) == [-2.0, 1.0]
    assert POLICY_LOSSES["policy_gradient"](inputs).losses.tolist() == pytest.approx(
        [-2 * math.log(1.5), math.log(0.1)]
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_the_plain_policy_gradient(name):
    inputs = tokens([1.0, 1.0, 1.0], [0.5, 0.5, 0.5])
    assert gradient(name, inputs) == pytest.approx([-0.5] * 3)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_are_homogeneous_in_advantages(name):
    """So a correction's weight of a sample may stand in its advantages."""
    inputs = replace(loss_inputs(0), dual_clip=1.5)
    once = POLICY_LOSSES[name](inputs).losses
    torch.testing.assert_close(POLICY_LOSSES[name](replace(inputs, advantages=3 * inputs.advantages)).losses, 3 * once)


def slow_loss(name: str, inputs: PolicyLossInputs) -> list[float]:
    """Every loss, token by token; 0 at masked tokens."""
    log_probs, old = inputs.log_probs.tolist(), inputs.old_log_probs.tolist()
    advantages, result, end = inputs.advantages.tolist(), [0.0] * len(old), 0
    for length in inputs.lengths:
        start, end = end, end + length
        kept = [t for t in range(start, end) if inputs.action_mask[t]]
        log_ratios = {t: log_probs[t] - old[t] for t in kept}
        for t in kept:
            result[t] = slow_token_loss(name, inputs, log_ratios, t, advantages[t], log_probs[t])
    return result


def slow_token_loss(
    name: str, inputs: PolicyLossInputs, log_ratios: dict[int, float], t: int, a: float, log_prob: float
) -> float:
    low, high = 1 - inputs.eps_low, 1 + inputs.eps_high
    log_ratio = log_ratios[t]
    ratio = math.exp(log_ratio)
    if name in ("ppo_clip", "gspo"):
        if name == "gspo":
            ratio = math.exp(sum(log_ratios.values()) / len(log_ratios))
        loss = -min(ratio * a, min(max(ratio, low), high) * a)
        return min(loss, -inputs.dual_clip * a) if inputs.dual_clip and a < 0 else loss
    if name == "gmpo":
        bound = [min(x, inputs.eps_high) if a > 0 else max(x, -inputs.eps_low) for x in log_ratios.values()]
        return -a * math.exp(sum(bound) / len(bound))
    if name == "cpgd":
        bound = min(log_ratio, math.log(high)) if a > 0 else max(log_ratio, math.log(low))
        return -bound * a + inputs.drift_coef * (ratio - 1 - log_ratio)
    if name == "cispo":
        return -min(max(ratio, low), high) * a * log_prob
    if name == "sapo":
        tau = inputs.tau_positive if a > 0 else inputs.tau_negative
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
    return -a * log_prob


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_losses_equal_a_slow_reference(name, seed):
    inputs = replace(loss_inputs(seed), **WITH_SETTINGS)
    losses = torch.where(inputs.action_mask, POLICY_LOSSES[name](inputs).losses, 0.0)
    assert losses.tolist() == pytest.approx(slow_loss(name, inputs), abs=1e-6)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_order_and_split_of_samples_change_no_tokens_loss_or_gradient(name):
    inputs = replace(loss_inputs(1), **WITH_SETTINGS)

    def both(part: PolicyLossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        losses = torch.where(part.action_mask, POLICY_LOSSES[name](part).losses, 0.0)
        return losses.detach(), torch.autograd.grad(losses.sum(), part.log_probs)[0]

    whole = both(inputs)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(2)).tolist()
    parts = [both(take_loss_samples(inputs, order[start : start + 5])) for start in range(0, 12, 5)]
    for flat, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        expected = take_tokens(flat, inputs.lengths, order)
        torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_sample_without_kept_tokens_has_finite_losses_and_no_gradient(name):
    """NUM-07."""
    inputs = tokens([1.0, 1.0], [0.0, 0.0])
    inputs = replace(inputs, action_mask=torch.zeros(2, dtype=torch.bool))
    result: PolicyLoss = POLICY_LOSSES[name](inputs)
    assert result.losses.isfinite().all()
    kept = torch.where(inputs.action_mask, result.losses, 0.0).sum()
    (values,) = torch.autograd.grad(kept, inputs.log_probs)
    assert kept.item() == 0.0 and values.tolist() == [0.0, 0.0]
