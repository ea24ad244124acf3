from dataclasses import replace

import pytest

from lightrft.trainer.dynamic_sampling import chosen_groups, further_rows, has_variance
from tests.tiny_models import sample


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0, 1.0], False),
        ([0.3, 0.3, None], False),
        ([None, None], False),
        ([1.0, None], False),
        ([1.0, None, 0.5], True),
    ],
)
def test_a_group_is_kept_where_two_rewards_differ(rewards, expected):
    """RWD-07: what has no reward is not compared."""
    group = [replace(sample([3], [4]), reward=reward) for reward in rewards]
    assert has_variance(group) == expected


@pytest.mark.parametrize(
    ("kept", "others", "expected"),
    [
        ([9, 2, 5, 7], [0, 1], {2, 5, 7}),  # More than enough: the first that were drawn.
        ([9], [4, 0, 1], {9, 0, 1}),  # The others fill the batch.
        ([], [3, 1], {1, 3}),
    ],
)
def test_three_groups_are_chosen_where_there_are_as_many(kept, others, expected):
    assert chosen_groups(kept, others, 3) == expected


def test_further_rows_are_new_ones_until_there_are_no_more():
    first = further_rows(10, 4, {1, 2, 3}, (0, 1, 1))
    assert len(set(first)) == 4 and not set(first) & {1, 2, 3}
    second = further_rows(10, 4, {1, 2, 3, *first}, (0, 1, 2))
    assert sorted([1, 2, 3, *first, *second]) == list(range(10))
    assert further_rows(10, 4, range(10), (0, 1, 3)) == []


def test_further_rows_depend_on_seed_step_and_try():
    draws = {tuple(further_rows(1000, 8, (), seed)) for seed in [(0, 1, 1), (1, 1, 1), (0, 2, 1), (0, 1, 2)]}
    assert len(draws) == 4
    assert further_rows(1000, 8, (), (0, 1, 1)) == further_rows(1000, 8, (), (0, 1, 1))
