"""Media shares: work on every row of a data set, dealt to all ranks, whose results all of them get."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")

READING = "reading prompts"
"""The phase in which a rank fails that never comes to the work."""
AT_ONCE = 1_000
"""Results of all ranks together that travel in one exchange."""


class Ranks(Protocol):
    """Those of the run, as `Collectives` has them."""

    rank: int
    world_size: int

    def agree(self, error: BaseException | None, phase: str) -> None: ...
    def collect(self, phase: str) -> AbstractContextManager[None]: ...
    def all_gather_objects(self, obj: Any) -> list[Any]: ...


def by_shares(ranks: Ranks, items: Sequence[T], work: Callable[[Sequence[T]], list[R]], phase: str) -> list[R]:
    """What `work` makes of the items, in their order. Every rank must call it, with the same ones.

    Raises:
        ValueError: on all ranks, where they have not as many items.
        PhaseError: on all ranks, where `work` fails on one; on this one, where another has failed before.
    """
    ranks.agree(None, READING)
    counts = ranks.all_gather_objects(len(items))
    if len(set(counts)) > 1:
        raise ValueError(
            f"every rank must have the same prompts in the same order: {phase} found {min(counts)} of them on rank "
            f"{counts.index(min(counts))} and {max(counts)} on rank {counts.index(max(counts))}. Compare the files of "
            "the nodes."
        )
    own: list[R] = []
    with ranks.collect(phase):
        # Neighbours are alike, long clips of one source for instance: each rank gets some of all.
        own = work(items[ranks.rank :: ranks.world_size])
    results: list[R] = []
    every = max(1, AT_ONCE // ranks.world_size)
    for start in range(0, -(-len(items) // ranks.world_size), every):
        parts = ranks.all_gather_objects(own[start : start + every])
        results += [part[i] for i in range(len(parts[0])) for part in parts if i < len(part)]
    return results
