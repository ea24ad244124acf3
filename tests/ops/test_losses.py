import math

import pytest
import torch

from lightrft.ops.aggregation import mean_scale
from lightrft.ops.losses import PolicyLoss, PolicyLossInputs, ppo_clip, ppo_clip_loss, value_loss
from lightrft.ops.segments import masked_sum, zero_masked


def clip_loss(advantage: float, ratio: float) -> PolicyLoss:
    return ppo_clip_loss(
        torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), eps_low=0.2, eps_high=0.28
    )


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "clipped_low", "clipped_high"),
    [
        (1.0, 1.5, -1.28, False, True),
        (1.0, 5.0, -1.28, False, True),
        (-1.0, 0.5, 0.8, True, False),
        (-1.0, 5.0, 5.0, False, False),  # A worse action that became likelier is never clipped.
        (1.0, 0.5, -0.5, False, False),
        (2.0, 1.1, -2.2, False, False),
        (0.0, 5.0, 0.0, False, False),
    ],
)
def test_clipping_follows_the_sign_of_the_advantage(advantage, ratio, loss, clipped_low, clipped_high):
    """NUM-18."""
    result = clip_loss(advantage, ratio)
    assert result.losses.item() == pytest.approx(loss, abs=1e-6)
    assert (result.clipped_low.item(), result.clipped_high.item()) == (clipped_low, clipped_high)


def test_the_record_of_inputs_carries_both_clip_ranges():
    """Ratio 1.5 gains up to 1.28, ratio 0.5 loses down to 0.8."""
    inputs = PolicyLossInputs(
        log_probs=torch.tensor([math.log(1.5), math.log(0.5)]),
        old_log_probs=torch.zeros(2),
        rollout_log_probs=None,
        advantages=torch.tensor([1.0, -1.0]),
        action_mask=torch.ones(2, dtype=torch.bool),
        lengths=[2],
        eps_low=0.2,
        eps_high=0.28,
    )
    assert ppo_clip(inputs).losses.tolist() == pytest.approx([-1.28, 0.8])


def test_only_unclipped_tokens_have_a_gradient():
    # Ratios 1.5, 0.5, 1: the first two are clipped; the third has d(-ratio * 3) = -3.
    log_probs = torch.tensor([math.log(1.5), math.log(0.5), 0.0], requires_grad=True)
    ppo_clip_loss(log_probs, torch.zeros(3), torch.tensor([1.0, -1.0, 3.0]), 0.2, 0.28).losses.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [0.0, 0.0, -3.0]


def test_value_loss_takes_the_larger_error():
    # Value 2 moved from 1: held within 0.2 it is 1.2.
    values, old_values = torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0])
    returns = torch.tensor([2.5, 0.0])  # errors 0.5 or 1.3, and 2 or 1.2
    loss = value_loss(values, old_values, returns, clip=0.2)
    assert loss.tolist() == pytest.approx([0.5 * 1.3**2, 0.5 * 2.0**2])


def test_value_loss_with_clip_zero_is_half_the_squared_error():
    loss = value_loss(torch.tensor([2.0]), torch.tensor([-50.0]), torch.tensor([2.5]), clip=0.0)
    assert loss.item() == 0.125


def test_value_loss_at_the_old_value_has_the_whole_gradient():
    values = torch.tensor([2.0], requires_grad=True)
    value_loss(values, values.detach(), torch.tensor([5.0]), clip=0.2).sum().backward()
    assert values.grad is not None and values.grad.item() == -3.0


def test_one_divisor_over_micro_batches_gives_the_token_mean():
    """NUM-05: (4 * 1 + 1 * 3) / (4 + 1) = 1.4, not the mean of means (1 + 3) / 2."""
    scale = mean_scale(5, world_size=1)
    micro_batches = [torch.ones(4), torch.tensor([3.0])]
    total = sum(masked_sum(losses, torch.ones_like(losses, dtype=torch.bool)) * scale for losses in micro_batches)
    assert total == pytest.approx(1.4)


@pytest.mark.parametrize("sizes", [[12], [4, 4, 4], [1, 5, 6], [1] * 12])
def test_gradients_are_the_same_under_any_split(sizes):
    """NUM-05."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 3, generator=generator)
    mask = torch.rand(12, generator=generator) > 0.3

    def gradient(sizes: list[int]) -> torch.Tensor:
        weight = torch.ones(3, requires_grad=True)
        scale = mean_scale(int(mask.sum()), world_size=1)
        for rows, kept in zip(inputs.split(sizes), mask.split(sizes), strict=True):
            (masked_sum((rows @ weight).square(), kept) * scale).backward()
        assert weight.grad is not None
        return weight.grad

    kept_inputs = inputs[mask]
    # d mean((x w)^2) = mean(2 (x w) x), with w = 1
    expected = (2 * kept_inputs.sum(1, keepdim=True) * kept_inputs).mean(0)
    torch.testing.assert_close(gradient(sizes), expected, rtol=1e-5, atol=1e-7)


def test_gradients_averaged_over_ranks_are_those_of_the_global_mean():
    """NUM-06: one token with gradient 1 and three with gradient 2: (1 + 3 * 2) / 4 = 1.75."""
    scale = mean_scale(4, world_size=2)
    gradients = []
    for slopes in (torch.tensor([1.0]), torch.tensor([2.0, 2.0, 2.0])):
        weight = torch.zeros((), requires_grad=True)
        (masked_sum(slopes * weight, torch.ones_like(slopes, dtype=torch.bool)) * scale).backward()
        gradients.append(weight.grad)
    assert sum(gradients) / 2 == 1.75


def test_micro_batch_without_kept_tokens_adds_nothing():
    """NUM-07."""
    log_probs = torch.tensor([math.nan, -1.0], requires_grad=True)
    mask = torch.zeros(2, dtype=torch.bool)
    loss = ppo_clip_loss(zero_masked(log_probs, mask), torch.zeros(2), torch.ones(2), 0.2, 0.2)
    total = masked_sum(loss.losses, mask) * mean_scale(0, world_size=2)
    total.backward()
    assert total.item() == 0.0
    assert log_probs.grad is not None and log_probs.grad.tolist() == [0.0, 0.0]
    assert not (loss.clipped_low | loss.clipped_high).any()


def test_masked_tokens_leave_numerator_and_denominator():
    """NUM-08: 4 kept tokens with loss 1, 6 masked: 4 / 4, not 4 / 10."""
    mask = torch.tensor([True] * 4 + [False] * 6)
    assert masked_sum(torch.ones(10), mask) * mean_scale(int(mask.sum()), world_size=1) == 1.0
