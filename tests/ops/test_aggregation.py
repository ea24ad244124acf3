import pytest
import torch

from lightrft.ops.aggregation import AGGREGATIONS, mean_scale
from lightrft.ops.losses import POLICY_LOSSES
from lightrft.ops.segments import masked_sum
from tests.ops.ragged import loss_inputs, take_loss_samples, take_tokens

MASK = torch.tensor([True, True, True, True, True, False, False, False])
LENGTHS = [4, 2, 2]
LOSSES = torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0, 50.0, 60.0, 70.0])
MAX_NEW_TOKENS = 8


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 7 / 5),
        ("seq-mean-token-mean", (1 + 3) / 2),
        ("seq-mean-token-sum", (4 + 3) / 2),
        ("seq-mean-token-sum-norm", (4 + 3) / 2 / 8),
    ],
)
def test_modes_of_four_tokens_with_loss_one_and_one_with_loss_three(mode, expected):
    """NUM-05, NUM-08: a masked token and a sample without kept tokens count nowhere."""
    aggregation = AGGREGATIONS[mode]
    weights = aggregation.weights(MASK, LENGTHS, MAX_NEW_TOKENS)
    total = masked_sum(weights * LOSSES, MASK) * mean_scale(aggregation.count(MASK, LENGTHS), world_size=1)
    assert total.item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_step_without_kept_tokens_is_zero(mode):
    """NUM-07."""
    aggregation = AGGREGATIONS[mode]
    mask = torch.zeros(8, dtype=torch.bool)
    assert aggregation.weights(mask, LENGTHS, MAX_NEW_TOKENS).isfinite().all()
    assert aggregation.count(mask, LENGTHS) == mean_scale(0, world_size=2) == 0


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "gmpo"])
def test_no_split_over_micro_batches_and_ranks_changes_the_gradient(mode, loss):
    """NUM-05, NUM-06: samples in another order, three ranks of one or two micro-batches each, averaged over ranks."""
    inputs = loss_inputs(3)
    aggregation = AGGREGATIONS[mode]
    total = aggregation.count(inputs.action_mask, inputs.lengths)

    def gradients(order: list[int], world_size: int) -> torch.Tensor:
        part = take_loss_samples(inputs, order)
        weights = aggregation.weights(part.action_mask, part.lengths, MAX_NEW_TOKENS)
        loss_sum = masked_sum(weights * POLICY_LOSSES[loss](part).losses, part.action_mask)
        return torch.autograd.grad(loss_sum * mean_scale(total, world_size), inputs.log_probs)[0] / world_size

    order = torch.randperm(12, generator=torch.Generator().manual_seed(4)).tolist()
    ranks = [[order[:2], order[2:5]], [order[5:6], order[6:8]], [order[8:]]]
    split = sum(gradients(micro, world_size=3) for rank in ranks for micro in rank)
    torch.testing.assert_close(split, gradients(list(range(12)), world_size=1), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_counts_of_parts_add_up(mode):
    inputs = loss_inputs(5)
    parts = [range(0, 4), range(4, 12)]
    counts = [
        AGGREGATIONS[mode].count(
            take_tokens(inputs.action_mask, inputs.lengths, part), [inputs.lengths[i] for i in part]
        )
        for part in parts
    ]
    assert sum(counts) == AGGREGATIONS[mode].count(inputs.action_mask, inputs.lengths)
