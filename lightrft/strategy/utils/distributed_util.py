"""Rank arithmetic: rollout groups, shares of a list, and plans of micro-batches. Pure, the same on every rank."""

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from lightrft.config.checks import tp_size_error


def rollout_tp_groups(world_size: int, tp_size: int) -> list[list[int]]:
    """Ranks that generate together: neighbours.

    Raises:
        ValueError: `tp_size` does not divide `world_size`.
    """
    _check_tp_size(world_size, tp_size)
    return [list(range(first, first + tp_size)) for first in range(0, world_size, tp_size)]


def rollout_dp_groups(world_size: int, tp_size: int) -> list[list[int]]:
    """Ranks with the same place in their TP group: every `tp_size`-th.

    Raises:
        ValueError: `tp_size` does not divide `world_size`.
    """
    _check_tp_size(world_size, tp_size)
    return [list(range(first, world_size, tp_size)) for first in range(tp_size)]


def _check_tp_size(world_size: int, tp_size: int) -> None:
    if error := tp_size_error(world_size, tp_size):
        raise ValueError(error)


def format_ranks(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-2, 5`."""
    ordered = sorted(set(ranks))
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1]
    runs = [ordered[a:b] for a, b in pairwise([0, *breaks, len(ordered)])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs if run)
    return f"rank {text}" if len(ordered) == 1 else f"ranks {text}"


def local_share(n: int, index: int, size: int) -> range:
    """The `index`-th of `size` contiguous parts of `range(n)`; their sizes differ by at most one, larger ones first."""
    assert 0 <= index < size
    smaller, larger_parts = divmod(n, size)
    start = index * smaller + min(index, larger_parts)
    return range(start, start + smaller + (index < larger_parts))


def balanced_destinations(costs: Sequence[float], size: int, max_items: int | None = None) -> list[int]:
    """For each item the rank, of `size`, that takes it, so that the ranks' total costs are close.

    Heaviest item first, onto the least loaded rank with fewer than `max_items` items. Ties go to the earlier item, the
    rank with fewer items, the lower rank.
    """
    assert max_items is None or len(costs) <= size * max_items
    destinations = [0] * len(costs)
    ranks = [(0.0, 0, rank) for rank in range(size)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, count, rank = heapq.heappop(ranks)
        destinations[item] = rank
        if max_items is None or count + 1 < max_items:
            heapq.heappush(ranks, (load + costs[item], count + 1, rank))
    return destinations


def plan_micro_batches(
    lengths: Sequence[int], max_tokens: int | None, max_samples: int, padded: bool = False
) -> list[list[int]]:
    """Indices of the samples in each micro-batch: as few micro-batches as the limit allows, of similar cost.

    Args:
        lengths: tokens of each sample, `(B,)`.
        max_tokens: limit of a micro-batch's cost; where set, it rules instead of `max_samples`. A sample above it
            is alone.
        padded: the cost is samples x longest sample, not the sum of the lengths, and samples of similar length meet.
    """
    plan = _padded_plan if padded else _packed_plan
    return sorted(sorted(micro_batch) for micro_batch in plan(lengths, max_tokens, max_samples))


def extend_plan(plan: Sequence[Sequence[int]], count: int, lengths: Sequence[int]) -> list[list[int]]:
    """The plan with `count` micro-batches, so that all ranks run as many.

    The micro-batch with the most tokens is split in two, again and again. Once each holds one sample, empty ones
    follow.
    """
    assert len(plan) <= count
    extended = [list(micro_batch) for micro_batch in plan]
    while len(extended) < count:
        position = _heaviest(extended, lengths)
        if position is None:
            return extended + [[] for _ in range(count - len(extended))]
        extended[position : position + 1] = _split(extended[position], 2, lengths)
    return extended


def _heaviest(plan: list[list[int]], lengths: Sequence[int]) -> int | None:
    """Position of the micro-batch with the most tokens among those of two samples or more."""
    divisible = [position for position, micro_batch in enumerate(plan) if len(micro_batch) > 1]
    return max(divisible, key=lambda position: _total(plan[position], lengths), default=None)


def _total(indices: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in indices)


def _split(
    indices: Sequence[int], count: int, lengths: Sequence[int], max_samples: int | None = None
) -> list[list[int]]:
    """`indices` in `count` parts with close sums of lengths."""
    parts: list[list[int]] = [[] for _ in range(count)]
    destinations = balanced_destinations([lengths[i] for i in indices], count, max_samples)
    for i, destination in zip(indices, destinations, strict=True):
        parts[destination].append(i)
    return parts


def _packed_plan(lengths: Sequence[int], max_tokens: int | None, max_samples: int) -> list[list[int]]:
    everything = range(len(lengths))
    if max_tokens is None:
        return _split(everything, math.ceil(len(lengths) / max_samples), lengths, max_samples)
    alone = [[i] for i in everything if lengths[i] > max_tokens]
    fitting = [i for i in everything if lengths[i] <= max_tokens]
    # Balanced parts may not reach the lower bound, so the count grows until they fit; one sample each always does.
    fewest = max(1, math.ceil(_total(fitting, lengths) / max_tokens))
    for count in range(fewest, len(fitting) + 1):
        parts = _split(fitting, count, lengths)
        if all(_total(part, lengths) <= max_tokens for part in parts):
            return alone + parts
    return alone


def _padded_plan(lengths: Sequence[int], max_tokens: int | None, max_samples: int) -> list[list[int]]:
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    most_samples = max_samples if max_tokens is None else len(lengths)
    highest = len(lengths) * max(lengths, default=0) if max_tokens is None else max_tokens
    count = len(_cut(longest_first, lengths, highest, most_samples))
    # The lowest ceiling that needs no more micro-batches evens out their costs.
    low, high = 0, highest
    while low < high:
        middle = (low + high) // 2
        if len(_cut(longest_first, lengths, middle, most_samples)) <= count:
            high = middle
        else:
            low = middle + 1
    return _cut(longest_first, lengths, high, most_samples)


def _cut(longest_first: Sequence[int], lengths: Sequence[int], max_cost: int, max_samples: int) -> list[list[int]]:
    """Consecutive parts that cost at most `max_cost` (samples x longest), unless one sample alone costs more."""
    parts: list[list[int]] = []
    for i in longest_first:
        last = parts[-1] if parts else None
        if last is not None and len(last) < max_samples and (len(last) + 1) * lengths[last[0]] <= max_cost:
            last.append(i)
        else:
            parts.append([i])
    return parts
