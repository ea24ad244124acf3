"""What a weight sync gathers together, what it gathers ahead, and what it checks, by the sizes of the weights."""

import random

import pytest

from lightrft.strategy.utils.sync_plan import (
    SAMPLE_BYTES,
    SAMPLE_WEIGHTS,
    check_turns,
    overlaps,
    plan_buckets,
    sampled_weights,
)


def sizes(seed: int, count: int = 50, most: int = 40) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randint(1, most) for _ in range(count)]


def test_a_bucket_fills_half_its_bytes_and_a_larger_weight_is_alone():
    # Half of 16 is 8: 4 + 4 fit, 20 is alone, and 4 + 8 would be 12.
    assert plan_buckets([4, 4, 8, 20, 4, 8], bucket_bytes=16) == [
        range(0, 2),
        range(2, 3),
        range(3, 4),
        range(4, 5),
        range(5, 6),
    ]
    assert plan_buckets([], bucket_bytes=16) == []


@pytest.mark.parametrize("bucket_bytes", [1, 16, 64, 10_000])
def test_buckets_hold_every_weight_once_in_order(bucket_bytes):
    weights = sizes(seed=1)
    runs = plan_buckets(weights, bucket_bytes)
    assert [i for run in runs for i in run] == list(range(50))
    for run in runs:
        assert len(run) == 1 or 2 * sum(weights[i] for i in run) <= bucket_bytes


def test_the_next_bucket_is_gathered_ahead_where_memory_allows():
    # Limit 2 x 20. Buckets of 6 + 4 = 10, 30 alone, 10 alone: gathering them takes 20, 30, 10.
    # While 10 is loaded 30 more are 40; while 30 is loaded 10 more are 40, but with 1 byte of staging 41.
    assert overlaps([6, 4, 30, 10], bucket_bytes=20, staging_bytes=0) == [True, True, False]
    # The largest weight is 30, so the limit is 60.
    assert overlaps([6, 4, 30, 10], bucket_bytes=20, staging_bytes=20) == [True, True, False]
    assert overlaps([6, 4, 30, 10], bucket_bytes=20, staging_bytes=21) == [False, False, False]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("bucket_bytes", [2, 20, 70, 200])
@pytest.mark.parametrize("stages", ["nothing", "the largest"])
def test_a_sync_takes_at_most_twice_a_bucket_or_twice_the_largest_weight(seed, bucket_bytes, stages):
    """MEM-04: gathering many takes their bytes twice, and an engine may have a staging buffer for the largest."""
    weights = sizes(seed)
    staging_bytes = 0 if stages == "nothing" else max(bucket_bytes // 4, *weights)
    runs = plan_buckets(weights, bucket_bytes)
    held = [sum(weights[i] for i in run) for run in runs]
    gathering = [h if len(run) == 1 else 2 * h for run, h in zip(runs, held, strict=True)]
    ahead = overlaps(weights, bucket_bytes, staging_bytes)
    assert len(ahead) == len(runs) and not ahead[-1]
    peaks = [max(gathering[i], held[i] + gathering[i + 1] if ahead[i] else 0) for i in range(len(runs))]
    assert staging_bytes + max(peaks) <= 2 * max(bucket_bytes, *weights)


@pytest.mark.parametrize("count", [1, 16, 17, 26, 290])
def test_every_weight_has_its_turn_to_be_checked(count):
    weights = [10**6 * size for size in sizes(seed=2, count=count, most=200)]
    turns = check_turns(weights, 2 * SAMPLE_BYTES)
    assert sorted(i for turn in turns for i in turn) == list(range(count))
    for turn in turns:
        assert len(turn) <= SAMPLE_WEIGHTS
        assert len(turn) == 1 or sum(weights[i] for i in turn) <= SAMPLE_BYTES
    checked = {i for version in range(5, 5 + len(turns)) for i in sampled_weights(weights, 2 * SAMPLE_BYTES, version)}
    assert checked == set(range(count))


def test_a_small_bucket_makes_small_samples():
    # Half of 8 is 4: four of the 16 weights of each turn.
    assert check_turns([1] * 16, bucket_bytes=8) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


def test_small_weights_share_turns_from_all_over_the_model():
    # 32 weights make two turns of 16: the even ones and the odd ones.
    assert check_turns([1] * 32, 100) == [list(range(0, 32, 2)), list(range(1, 32, 2))]
    assert sampled_weights([1] * 32, 100, version=3) == list(range(1, 32, 2))
    assert sampled_weights([], 100, version=3) == []
