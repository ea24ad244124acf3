"""Rank lists, shares and plans of micro-batches."""

import random

import pytest

from lightrft.strategy.utils.distributed_util import (
    balanced_destinations,
    extend_plan,
    format_ranks,
    local_share,
    plan_micro_batches,
    rollout_dp_groups,
    rollout_tp_groups,
)


def _random_lengths(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(1, 50) for _ in range(draw.randint(0, 40))]


def _total(indices, lengths) -> int:
    return sum(lengths[i] for i in indices)


def test_rollout_groups_of_eight_ranks_match_the_spec():
    """DIST-04"""
    assert rollout_tp_groups(8, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rollout_dp_groups(8, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("groups", [rollout_tp_groups, rollout_dp_groups])
def test_a_tp_size_that_does_not_divide_the_world_is_refused_with_both_numbers_and_the_choice(groups):
    """DIST-04"""
    with pytest.raises(ValueError, match=r"6 ranks, engine_tp_size=4\. Set --engine_tp_size to 1, 2, 3 or 6\."):
        groups(6, 4)
    with pytest.raises(ValueError, match=r"1 ranks, engine_tp_size=2\. Set --engine_tp_size to 1\."):
        groups(1, 2)


def test_tp_and_dp_groups_meet_in_exactly_one_rank():
    for tp_group in rollout_tp_groups(12, 3):
        for dp_group in rollout_dp_groups(12, 3):
            assert len(set(tp_group) & set(dp_group)) == 1


def test_ranks_are_written_as_runs():
    assert format_ranks([3]) == "rank 3"
    assert format_ranks([5, 0, 2, 1]) == "ranks 0-2, 5"
    assert format_ranks([0, 1]) == "ranks 0-1"


def test_shares_are_contiguous_and_differ_by_at_most_one():
    # 7 = 3 + 2 + 2
    assert [list(local_share(7, i, 3)) for i in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    # Two items for three ranks: the last share is empty.
    assert [list(local_share(2, i, 3)) for i in range(3)] == [[0], [1], []]
    for n in range(20):
        for size in range(1, 8):
            assert [item for i in range(size) for item in local_share(n, i, size)] == list(range(n))


def test_heaviest_items_go_to_the_least_loaded_rank():
    # 9 -> rank 0 (9); 7 -> rank 1 (7); 6 -> rank 1 (13); 5 -> rank 0 (14); 2 -> rank 1 (15); 1 -> rank 0 (15)
    assert balanced_destinations([5, 9, 1, 6, 2, 7], size=2) == [0, 0, 0, 1, 1, 1]


def test_equal_items_are_dealt_in_turn_even_when_they_cost_nothing():
    assert balanced_destinations([3, 3, 3, 3], size=2) == [0, 1, 0, 1]
    assert balanced_destinations([0, 0, 0, 0], size=2) == [0, 1, 0, 1]


def test_a_full_rank_takes_no_more_items():
    # Without the limit: 9 on rank 0 and 1, 1, 1 on rank 1. With two at most: the last 1 must join the 9.
    assert balanced_destinations([9, 1, 1, 1], size=2) == [0, 1, 1, 1]
    assert balanced_destinations([9, 1, 1, 1], size=2, max_items=2) == [0, 1, 1, 0]


def test_without_a_budget_a_micro_batch_holds_at_most_max_samples_and_tokens_are_balanced():
    # Five samples, two at most: three micro-batches. 10 | 9 | 8, then 2 joins the 8 (10), 1 joins the 9 (10).
    assert plan_micro_batches([10, 9, 8, 2, 1], max_tokens=None, max_samples=2) == [[0], [1, 4], [2, 3]]


def test_the_token_budget_rules_instead_of_max_samples():
    """DIST-01"""
    # 120 tokens at 32: four fit nowhere together, 30 + 30 > 32.
    assert plan_micro_batches([30, 30, 30, 30], max_tokens=32, max_samples=1) == [[0], [1], [2], [3]]
    assert plan_micro_batches([10, 10], max_tokens=32, max_samples=1) == [[0, 1]]


def test_the_count_grows_until_balanced_micro_batches_fit():
    # Sum 24 asks for two of 12, but heaviest first gives 6 + 4 + 4 = 14 and 6 + 4 = 10.
    # Three: 6 | 6 | 4, the next 4 joins the 4 (8), the last one the first 6 (10).
    assert plan_micro_batches([6, 6, 4, 4, 4], max_tokens=12, max_samples=1) == [[0, 4], [1], [2, 3]]


def test_a_sample_over_the_budget_is_alone():
    assert plan_micro_batches([50, 5, 5], max_tokens=32, max_samples=8) == [[0], [1, 2]]
    assert plan_micro_batches([50], max_tokens=32, max_samples=8) == [[0]]
    assert plan_micro_batches([5, 50, 5], max_tokens=32, max_samples=8, padded=True) == [[0, 2], [1]]


def test_padded_samples_cost_count_times_longest():
    # 20 fits with one of 16 (2 x 20 = 40), then 16 + 4 + 4 would be 3 x 16 = 48 > 40: sorted by length
    # 20, 16 | 4, 4, 4 (3 x 4 = 12). A packed plan would have put 20 + 16 + 4 = 40 together.
    assert plan_micro_batches([4, 20, 4, 16, 4], max_tokens=40, max_samples=1, padded=True) == [[0, 2, 4], [1, 3]]


def test_padded_micro_batches_are_of_similar_cost():
    # Budget 40 fits four of 10, but two micro-batches are needed anyway: 3 + 3 rather than 4 + 2.
    assert plan_micro_batches([10] * 6, max_tokens=40, max_samples=1, padded=True) == [[0, 1, 2], [3, 4, 5]]


def test_padded_samples_of_similar_length_meet_without_a_budget():
    assert plan_micro_batches([9, 1, 8, 2], max_tokens=None, max_samples=2, padded=True) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 64])
def test_a_plan_holds_each_index_once_within_its_limit(padded, max_tokens):
    for seed in range(50):
        lengths = _random_lengths(seed)
        plan = plan_micro_batches(lengths, max_tokens, max_samples=3, padded=padded)
        assert sorted(i for micro_batch in plan for i in micro_batch) == list(range(len(lengths)))
        for micro_batch in plan:
            longest = max(lengths[i] for i in micro_batch)
            cost = len(micro_batch) * longest if padded else _total(micro_batch, lengths)
            assert (len(micro_batch) <= 3) if max_tokens is None else (cost <= max_tokens)


def test_a_plan_extended_splits_the_heaviest_micro_batch_in_two():
    # {5, 4, 3} = 12 is split into {5} and {4, 3}; then {4, 3} = 7 beats {6}: 4 | 3.
    lengths = [5, 4, 3, 6]
    assert extend_plan([[0, 1, 2], [3]], 3, lengths) == [[0], [1, 2], [3]]
    assert extend_plan([[0, 1, 2], [3]], 4, lengths) == [[0], [1], [2], [3]]


def test_a_plan_of_single_samples_is_extended_by_empty_micro_batches():
    """DIST-01"""
    # Rank 0 holds 10, 10 in one micro-batch, rank 1 needs four for 30, 30, 30, 30.
    assert extend_plan([[0, 1]], 4, [10, 10]) == [[0], [1], [], []]
    assert extend_plan([], 2, []) == [[], []]


def test_an_extended_plan_holds_each_index_once():
    for seed in range(50):
        lengths = _random_lengths(seed)
        plan = plan_micro_batches(lengths, 64, max_samples=1)
        extended = extend_plan(plan, len(plan) + seed % 7, lengths)
        assert len(extended) == len(plan) + seed % 7
        assert sorted(i for micro_batch in extended for i in micro_batch) == list(range(len(lengths)))
        if len(lengths) >= len(extended):
            assert all(extended)
