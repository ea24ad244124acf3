import math
from dataclasses import replace

import pytest
import torch

from lightrft.ops.corrections import CORRECTIONS, CorrectionInputs
from tests.ops.ragged import loss_inputs, take_loss_samples, take_tokens


def inputs_of(ratios: list[float], lengths: list[int], mask: list[bool]) -> CorrectionInputs:
    rollout_log_probs = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    return CorrectionInputs(
        old_log_probs=rollout_log_probs + torch.tensor(ratios, dtype=torch.float64).log(),
        rollout_log_probs=rollout_log_probs,
        action_mask=torch.tensor(mask),
        lengths=lengths,
        low=0.5,
        high=2.0,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Ratios 1.5, 1.6 (product 2.4) | 4, 0.25, and a masked 100 (product 1) | 0.2
        ("tis", [1.5, 1.6, 2.0, 0.25, 0.2]),
        ("sequence_tis", [2.0, 2.0, 1.0, 1.0, 0.2]),
        ("mis", [1.5, 1.6, 0.0, 0.25, 0.2]),
        ("sequence_mis", [0.0, 0.0, 1.0, 1.0, 0.2]),
        ("icepop", [1.5, 1.6, 0.0, 0.0, 0.0]),
    ],
)
def test_weights_of_ratios_within_and_beyond_a_half_and_two(name, expected):
    inputs = inputs_of([1.5, 1.6, 4.0, 0.25, 100.0, 0.2], [2, 3, 1], [True] * 4 + [False, True])
    assert CORRECTIONS[name](inputs)[inputs.action_mask].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_equal_policies_need_no_correction(name):
    inputs = inputs_of([1.0] * 5, [2, 3], [True, False, True, True, True])
    assert CORRECTIONS[name](inputs)[inputs.action_mask].tolist() == [1.0] * 4


@pytest.mark.parametrize("name", CORRECTIONS)
def test_what_stands_at_masked_tokens_is_not_read(name):
    inputs = inputs_of([1.5, 1.0], [2], [True, False])
    spoiled = torch.where(inputs.action_mask, inputs.old_log_probs, math.nan)
    weights = CORRECTIONS[name](replace(inputs, old_log_probs=spoiled))
    assert weights[0].item() == pytest.approx(1.5)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_ratios_beyond_floating_point_stay_finite(name):
    inputs = inputs_of([1.0], [1], [True])
    for difference in (-2000.0, 2000.0):
        weights = CORRECTIONS[name](replace(inputs, old_log_probs=inputs.rollout_log_probs + difference))
        assert weights.item() in (0.0, 2.0)


def slow_weights(name: str, inputs: CorrectionInputs) -> list[float]:
    result, end = [0.0] * len(inputs.action_mask), 0
    for length in inputs.lengths:
        start, end = end, end + length
        kept = [t for t in range(start, end) if inputs.action_mask[t]]
        ratios = {t: math.exp(inputs.old_log_probs[t].item() - inputs.rollout_log_probs[t].item()) for t in kept}
        for t in kept:
            ratio = math.prod(ratios.values()) if name.startswith("sequence") else ratios[t]
            if name.endswith("tis"):
                result[t] = min(ratio, inputs.high)
            elif ratio <= inputs.high and (name != "icepop" or ratio >= inputs.low):
                result[t] = ratio
    return result


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_equal_a_slow_reference_in_any_order_and_split(name):
    inputs = loss_inputs(0, spread=0.8)

    def weights(order: list[int]) -> tuple[torch.Tensor, CorrectionInputs]:
        part = take_loss_samples(inputs, order)
        assert part.rollout_log_probs is not None
        correction = CorrectionInputs(
            part.old_log_probs, part.rollout_log_probs, part.action_mask, part.lengths, low=0.5, high=2.0
        )
        return torch.where(part.action_mask, CORRECTIONS[name](correction), 0.0), correction

    whole, record = weights(list(range(12)))
    assert whole.tolist() == pytest.approx(slow_weights(name, record), abs=1e-6)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    parts = torch.cat([weights(order[:7])[0], weights(order[7:])[0]])
    torch.testing.assert_close(parts, take_tokens(whole, inputs.lengths, order), rtol=0, atol=1e-12)
