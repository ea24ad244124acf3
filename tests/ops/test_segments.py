import math

import pytest
import torch

from lightrft.ops.segments import (
    kept_counts,
    last_kept_index,
    masked_moments,
    masked_sum,
    mean_std,
    segment_ids,
    segment_mean,
    segment_sum,
    whiten,
    zero_masked,
)

LENGTHS = (2, 0, 3, 1)
MASK = torch.tensor([True, True, True, False, True, False])
VALUES = torch.tensor([1.0, 2.0, 3.0, math.nan, 5.0, math.inf])


def test_segment_ids_name_the_sample_of_each_token():
    assert segment_ids(LENGTHS, "cpu").tolist() == [0, 0, 2, 2, 2, 3]


def test_kept_counts_and_last_kept_index_skip_masked_tokens():
    assert kept_counts(MASK, LENGTHS).tolist() == [2, 0, 2, 0]
    assert last_kept_index(MASK, LENGTHS).tolist() == [1, -1, 4, -1]


def test_last_kept_index_is_before_trailing_masked_tokens():
    mask = torch.tensor([False, True, True, False, False, True])
    assert last_kept_index(mask, (5, 1)).tolist() == [2, 5]


def test_segment_sum_adds_each_sample_alone():
    assert segment_sum(torch.arange(6.0), LENGTHS).tolist() == [1.0, 0.0, 9.0, 5.0]


def test_segment_mean_divides_by_the_kept_tokens():
    # (1 + 2) / 2, no token, (3 + 5) / 2, no kept token
    assert segment_mean(VALUES, MASK, LENGTHS).tolist() == [1.5, 0.0, 4.0, 0.0]


def test_segment_mean_spreads_its_gradient_over_the_kept_tokens():
    values = VALUES.clone().requires_grad_()
    segment_mean(values, MASK, LENGTHS).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0.5, 0.5, 0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_no_tokens_at_all_give_zeros(lengths):
    values, mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    assert segment_sum(values, lengths).tolist() == [0.0] * len(lengths)
    assert segment_mean(values, mask, lengths).tolist() == [0.0] * len(lengths)
    assert kept_counts(mask, lengths).tolist() == [0] * len(lengths)
    assert last_kept_index(mask, lengths).tolist() == [-1] * len(lengths)
    assert masked_sum(values, mask).item() == 0.0


def test_masked_sum_never_reads_masked_tokens():
    assert masked_sum(VALUES, MASK).item() == 11.0


def test_nothing_kept_sums_to_exact_zero_with_zero_gradients():
    """NUM-07."""
    values = VALUES.clone().requires_grad_()
    total = masked_sum(values, torch.zeros_like(MASK))
    total.backward()
    assert total.item() == 0.0
    assert values.grad is not None and values.grad.tolist() == [0.0] * 6


def test_inputs_masked_before_an_elementwise_loss_keep_nan_out_of_its_gradient():
    """NUM-07."""
    inputs = VALUES.clone().requires_grad_()
    masked_sum(zero_masked(inputs, MASK).exp(), MASK).backward()
    expected = [math.exp(1), math.exp(2), math.exp(3), 0.0, math.exp(5), 0.0]
    assert inputs.grad is not None and inputs.grad.tolist() == pytest.approx(expected, rel=1e-6)


def test_masked_moments_are_sum_sum_of_squares_and_count():
    # 1 + 2 + 3 + 5, 1 + 4 + 9 + 25
    moments = masked_moments(VALUES, MASK)
    assert moments.dtype == torch.float64 and moments.tolist() == [11.0, 39.0, 4.0]


def test_mean_std_is_the_population_one():
    # values 1, 2, 3: mean 2, variance (1 + 0 + 1) / 3
    mean, std = mean_std(torch.tensor([6.0, 14.0, 3.0], dtype=torch.float64))
    assert mean.item() == 2.0
    assert std.item() == pytest.approx(math.sqrt(2 / 3))


def test_mean_std_of_nothing_is_zero():
    mean, std = mean_std(torch.zeros(3, dtype=torch.float64))
    assert (mean.item(), std.item()) == (0.0, 0.0)


def test_whitening_with_added_moments_equals_one_process():
    """NUM-16: rank 0 [1, 2], rank 1 [3, pad], rank 2 nothing; population deviation sqrt(2 / 3), 1 / that = 1.2247."""
    shards = [
        (torch.tensor([1.0, 2.0]), torch.tensor([True, True])),
        (torch.tensor([3.0, math.nan]), torch.tensor([True, False])),
        (torch.zeros(0), torch.zeros(0, dtype=torch.bool)),
    ]
    moments = torch.stack([masked_moments(values, mask) for values, mask in shards]).sum(0)
    whitened = torch.cat([whiten(values, mask, moments) for values, mask in shards])
    assert whitened.tolist() == pytest.approx([-1.2247, 0.0, 1.2247, 0.0], abs=1e-4)
    assert whitened[3] == 0.0

    values, mask = (torch.cat(parts) for parts in zip(*shards, strict=True))
    assert torch.equal(whiten(values, mask, masked_moments(values, mask)), whitened)


def test_whitening_equal_values_gives_zeros():
    values, mask = torch.full((7,), 0.1), torch.ones(7, dtype=torch.bool)
    assert whiten(values, mask, masked_moments(values, mask)).abs().max() < 1e-6
