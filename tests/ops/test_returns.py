import math

import pytest
import torch

from lightrft.ops.kl import k1_kl
from lightrft.ops.returns import discounted_returns, gae, token_rewards


def keep(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool)


def test_score_lands_on_the_last_kept_token():
    """NUM-13: after a stop, in a truncated response of five tokens, before masked tokens, nowhere."""
    scores = torch.tensor([2.0, 3.0, 4.0, 5.0])
    mask = torch.cat([keep(3), keep(5), torch.tensor([True, False]), torch.tensor([False])])
    rewards = token_rewards(scores, None, 0.0, mask, [3, 5, 2, 1])
    assert rewards.tolist() == [0, 0, 2, 0, 0, 0, 0, 3, 4, 0, 0]


def test_kl_is_subtracted_from_the_reward():
    """NUM-10: 1 - 0.1 * (-1.0 + 1.5) = 0.95."""
    kl = k1_kl(torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert token_rewards(torch.ones(1), kl, 0.1, keep(1), [1]).item() == pytest.approx(0.95)


def test_kl_of_masked_tokens_is_not_read():
    kl = torch.tensor([1.0, math.nan, 3.0])
    rewards = token_rewards(torch.zeros(1), kl, 0.5, torch.tensor([True, False, True]), [3])
    assert rewards.tolist() == [-0.5, 0.0, -1.5]


def test_gae_skips_masked_tokens():
    """NUM-15: deltas 0, 0, 1 - 0.5; 0.5, then 0.95 * 0.5, then 0.95 * 0.475; the masked value of 7 is not read."""
    advantages, returns = gae(
        rewards=torch.tensor([0.0, 0.0, 1.0, 0.0]),
        values=torch.tensor([0.5, 0.5, 0.5, 7.0]),
        action_mask=torch.tensor([True, True, True, False]),
        lengths=[4],
        bootstrap_values=torch.zeros(1),
        gamma=1.0,
        lambd=0.95,
    )
    assert advantages.tolist() == pytest.approx([0.45125, 0.475, 0.5, 0.0])
    assert returns.tolist() == pytest.approx([0.95125, 0.975, 1.0, 0.0])
    assert (advantages[3], returns[3]) == (0.0, 0.0)


def test_gae_of_a_masked_token_in_the_middle_is_that_of_the_kept_tokens_alone():
    """NUM-15."""
    whole = gae(
        torch.tensor([0.0, math.nan, 1.0]),
        torch.tensor([0.5, math.inf, 0.25]),
        torch.tensor([True, False, True]),
        [3],
        torch.zeros(1),
        1.0,
        0.5,
    )
    # deltas 0 + 0.25 - 0.5 and 1 - 0.25; advantages -0.25 + 0.5 * 0.75 and 0.75
    assert whole[0].tolist() == [0.125, 0.0, 0.75]
    assert whole[1].tolist() == [0.625, 0.0, 1.0]


def test_gae_goes_on_with_the_bootstrap_value():
    # delta = 0 + 0.9 * 2 - 1 after a truncation; 0 - 1 after a stop
    advantages, _ = gae(torch.zeros(2), torch.ones(2), keep(2), [1, 1], torch.tensor([2.0, 0.0]), gamma=0.9, lambd=0.95)
    assert advantages.tolist() == pytest.approx([0.8, -1.0])


def test_discounted_returns_of_a_final_reward():
    # The masked token costs no discount: 2 * 0.5^2, 2 * 0.5, 0, 2 | 3
    mask = torch.tensor([True, True, False, True, True])
    returns = discounted_returns(torch.tensor([0.0, 0.0, math.nan, 2.0, 3.0]), mask, [4, 1], gamma=0.5)
    assert returns.tolist() == [0.5, 1.0, 0.0, 2.0, 3.0]


def test_no_samples_at_all_give_empty_results():
    none, no_mask = torch.zeros(0), keep(0)
    assert token_rewards(none, none, 0.1, no_mask, []).shape == (0,)
    assert discounted_returns(none, no_mask, [], 1.0).shape == (0,)
    advantages, returns = gae(none, none, no_mask, [], none, 1.0, 0.95)
    assert advantages.shape == returns.shape == (0,)
