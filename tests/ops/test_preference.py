import math

import pytest
import torch

from lightrft.ops.preference import bradley_terry_loss


def losses(chosen: list[float], rejected: list[float], margins: list[float]) -> torch.Tensor:
    return bradley_terry_loss(torch.tensor(chosen), torch.tensor(rejected), torch.tensor(margins))


def test_the_loss_is_minus_the_log_of_the_probability_that_the_chosen_wins():
    """Equal scores: log 2 = 0.6931. log 3 apart: the chosen wins with 3 / (3 + 1), so -log 0.75 = 0.2877; the other
    way round with 1 / 4: log 4 = 1.3863."""
    expected = torch.tensor([math.log(2), -math.log(0.75), math.log(4)])
    torch.testing.assert_close(losses([1.0, math.log(3), 0.0], [1.0, 0.0, math.log(3)], [0.0] * 3), expected)


def test_a_margin_is_what_the_difference_must_exceed():
    """A difference of log 3 with a margin of log 3 is as good as none: log 2."""
    torch.testing.assert_close(losses([math.log(3)], [0.0], [math.log(3)]), torch.tensor([math.log(2)]))
    assert losses([2.0], [0.0], [1.0]) == losses([1.0], [0.0], [0.0]) > losses([2.0], [0.0], [0.0])


def test_only_the_difference_counts():
    torch.testing.assert_close(losses([101.0], [99.0], [0.5]), losses([2.0], [0.0], [0.5]))


def test_the_gradient_of_each_score_is_the_probability_of_the_wrong_winner():
    """At a difference of log 3 that is 1 - 3/4 = 0.25."""
    chosen = torch.tensor([math.log(3)], requires_grad=True)
    rejected = torch.zeros(1, requires_grad=True)
    bradley_terry_loss(chosen, rejected, torch.zeros(1)).sum().backward()
    assert chosen.grad is not None and rejected.grad is not None
    assert (chosen.grad.item(), rejected.grad.item()) == (pytest.approx(-0.25), pytest.approx(0.25))


def test_far_apart_scores_have_a_finite_loss_and_gradient():
    chosen = torch.tensor([-1e4, 1e4], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.zeros(2), torch.zeros(2))
    loss.sum().backward()
    assert loss.tolist() == [1e4, 0.0] and chosen.grad is not None and chosen.grad.tolist() == [-1.0, 0.0]
