"""Team: the ranks of a rollout group, of which the first owns the engine and all get what comes of it."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lightrft.strategy.utils.collectives import Collectives

T = TypeVar("T")


class Team:
    """Every rank of the group calls each method, in the same order. A process without others is a team too."""

    def __init__(self, collectives: Collectives | None, group: dist.ProcessGroup | None) -> None:
        self._collectives = collectives
        self._group = group
        self.size = 1 if collectives is None or group is None else dist.get_world_size(group)
        self.is_leader = self.size == 1 or dist.get_rank(group) == 0

    def led(self, work: Callable[[], T]) -> T:
        """What `work` gives on the leader, which alone does it.

        Raises:
            RuntimeError: On all, if it failed.
        """
        if self.size == 1:
            return work()
        assert self._collectives is not None and self._group is not None
        result: T | None = None
        failure: Exception | None = None
        if self.is_leader:
            try:
                result = work()
            except Exception as error:
                # The others wait for it.
                failure = error
        outcome = (result, None if failure is None else str(failure))
        leader = dist.get_global_rank(self._group, 0)
        shared, message = self._collectives.broadcast_object(outcome, leader, self._group)
        if failure is not None:
            raise failure
        if message is not None:
            raise RuntimeError(f"on rank {leader}: {message}")
        return shared

    def gather(self, item: Any) -> list[Any]:
        """Everyone's item, the leader's first."""
        if self.size == 1:
            return [item]
        assert self._collectives is not None
        return self._collectives.all_gather_objects(item, self._group)
