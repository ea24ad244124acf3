import math

import pytest
import torch

from lightrft.ops.entropy import high_entropy_threshold
from lightrft.ops.segments import masked_moments
from lightrft.ops.shaping import normalise_rewards, soft_overlong_penalty


def test_the_overlong_penalty_grows_over_the_buffer():
    """Limit 20, buffer 4, factor 2: nothing up to 16, then -2 / 4 a token, at most -2."""
    penalty = soft_overlong_penalty(torch.tensor([3, 16, 17, 18, 20]), 20, 4, 2.0)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0, -2.0]


def test_rewards_are_divided_by_the_deviation_of_all_rewards_so_far():
    """Seen before: 0 and 4; now 2 and an excluded one: mean 2, deviation sqrt((4 + 0 + 4) / 3) = 1.633."""
    moments = masked_moments(torch.tensor([0.0, 4.0]), torch.tensor([True, True]))
    rewards, valid = torch.tensor([2.0, math.nan]), torch.tensor([True, False])
    moments = moments + masked_moments(rewards, valid)
    assert normalise_rewards(rewards, valid, moments, subtract_mean=False).tolist() == pytest.approx(
        [1.2247, 0], abs=1e-4
    )
    assert normalise_rewards(rewards, valid, moments, subtract_mean=True).tolist() == [0.0, 0.0]


def test_rewards_that_were_always_equal_keep_their_scale():
    rewards, valid = torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool)
    moments = masked_moments(rewards, valid)
    assert normalise_rewards(rewards, valid, moments, subtract_mean=False).tolist() == pytest.approx([0.1] * 3)
    assert normalise_rewards(rewards, valid, moments, subtract_mean=True).tolist() == pytest.approx([0.0] * 3, abs=1e-7)


@pytest.mark.parametrize(("ratio", "expected"), [(0.2, 5.0), (0.4, 4.0), (1.0, 1.0), (0.01, 5.0), (0.5, 4.0)])
def test_the_entropy_threshold_lets_the_ratio_of_tokens_pass(ratio, expected):
    assert high_entropy_threshold(torch.tensor([3.0, 1.0, 5.0, 2.0, 4.0]), ratio) == expected


def test_no_token_passes_where_there_is_none():
    assert high_entropy_threshold(torch.zeros(0), 0.2) == math.inf
