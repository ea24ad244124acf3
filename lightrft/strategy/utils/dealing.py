"""Dealer: which rank works on which sample."""

from collections.abc import Sequence
from typing import TypeVar

from lightrft.strategy.utils.collectives import Collectives
from lightrft.strategy.utils.distributed_util import balanced_destinations
from lightrft.types import Experience

T = TypeVar("T")


class Dealer:
    """Moves records between ranks, so that each carries about as many tokens. Every rank must call it alike."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def exchange(self, records: Sequence[T], destinations: Sequence[int]) -> list[T]:
        """Sends record i to rank `destinations[i]`; returns what came here by source. Every rank must call it."""
        outgoing: list[list[T]] = [[] for _ in range(self.collectives.world_size)]
        for record, destination in zip(records, destinations, strict=True):
            outgoing[destination].append(record)
        return [record for part in self.collectives.all_to_all_objects(outgoing) for record in part]

    def balance_groups(self, groups: list[list[Experience]]) -> list[list[Experience]]:
        """Deals whole groups over ranks by their tokens, ordered by prompt. Every rank must call it."""
        costs = [sum(sample.num_tokens for sample in group) for group in groups]
        dealt = self.exchange(groups, self._deal(costs, [0] * len(costs)))
        return sorted(dealt, key=lambda group: group[0].order)

    def deal_minibatches(
        self, samples: Sequence[Experience], minibatches: Sequence[Sequence[tuple[int, int]]]
    ) -> list[list[Experience]]:
        """Deals the samples of each minibatch over ranks by tokens; returns this rank's part of each.

        Every rank must call it.

        Args:
            samples: This rank's samples.
            minibatches: For each minibatch the `order` of its samples, over all ranks.
        """
        where = {order: i for i, minibatch in enumerate(minibatches) for order in minibatch}
        destinations = self._deal([s.num_tokens for s in samples], [where[s.order] for s in samples])
        received = sorted(self.exchange(samples, destinations), key=lambda sample: sample.order)
        return [[s for s in received if where[s.order] == i] for i in range(len(minibatches))]

    def _deal(self, costs: list[int], bins: list[int]) -> list[int]:
        """Destination of each local record, so that within each bin ranks carry equal cost over all ranks' records."""
        gathered = self.collectives.all_gather_objects((costs, bins))
        everything = [(bin_, cost) for costs_, bins_ in gathered for cost, bin_ in zip(costs_, bins_, strict=True)]
        destinations = [0] * len(everything)
        for bin_ in sorted({bin_ for bin_, _ in everything}):
            members = [i for i, (other, _) in enumerate(everything) if other == bin_]
            dealt = balanced_destinations([everything[i][1] for i in members], self.collectives.world_size)
            for i, destination in zip(members, dealt, strict=True):
                destinations[i] = destination
        start = sum(len(costs_) for costs_, _ in gathered[: self.collectives.rank])
        return destinations[start : start + len(costs)]
