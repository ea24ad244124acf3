"""Weight synchronisation: the actor's weights, in buckets, into the rollout engine."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lightrft.config.arguments import WeightCheck
from lightrft.strategy.engine import ManagedEngine
from lightrft.strategy.utils.collectives import Collectives
from lightrft.strategy.utils.prefetch import gathered_ahead
from lightrft.strategy.utils.sync_plan import overlaps, sampled_weights
from lightrft.types import WeightBucket, WeightSpec

_NAMED = 20
"""Faulty weights that an error names."""


@dataclass(frozen=True)
class SyncRecord:
    """What one weight sync did on this rank."""

    version: int
    seconds: float
    num_bytes: int
    num_verified: int
    """Weights that were loaded once more, and changed nothing."""

    def metrics(self) -> dict[str, float]:
        return {
            "sync/seconds": self.seconds,
            "sync/gib_per_second": self.num_bytes / 2**30 / self.seconds,
            "sync/verified_weights": self.num_verified,
        }


class BroadcastManager:
    """Installs the latest actor weights in the engine, or raises on all ranks alike."""

    def __init__(
        self,
        engine: ManagedEngine,
        collectives: Collectives,
        device: torch.device,
        bucket_bytes: int,
        check: WeightCheck,
    ) -> None:
        self.engine = engine
        self.collectives = collectives
        self.device = device
        self.bucket_bytes = bucket_bytes
        self.check: WeightCheck = check
        self._gathers = torch.cuda.Stream(device) if device.type == "cuda" else None

    def broadcast_to_engine(
        self, specs: Sequence[WeightSpec], gather: Callable[[Sequence[int]], Iterator[WeightBucket]], version: int
    ) -> SyncRecord:
        """Sends the weights; every rank must call it.

        Args:
            specs: Names and shapes of the weights, in their order.
            gather: Gives the weights with these indices in the buckets of `plan_buckets`. Each next() is a collective.
            version: Grows by one with each sync, or samples are checked that had their turn.

        Raises:
            PhaseError: A name or shape that the engine does not know, a weight of the engine that got no update, or one
                that the engine does not hold as it was sent.
        """
        started = time.perf_counter()
        with self.collectives.collect("weight check"):
            self.engine.begin_weight_update(specs)
        checked = self._checked(specs, version)
        faults: list[str] = []

        def verify(bucket: WeightBucket) -> None:
            faults.extend(self.engine.verify_weights(bucket))

        error = self._drain(specs, gather, range(len(specs)), self.engine.update_weights, None)
        # Gathered again even where they are few: copies of them would come on top of the largest weight.
        error = self._drain(specs, gather, checked, verify, error)
        with self.collectives.collect("weight sync"):
            if error is not None:
                raise error
            if faults:
                raise RuntimeError(_fault_message(faults, len(checked), version))
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        # On all ranks or on none: those that share an engine finish together.
        with self.collectives.collect("weight sync"):
            self.engine.finish_weight_update(version)
        num_bytes = sum(spec.num_bytes for spec in specs)
        return SyncRecord(version, time.perf_counter() - started, num_bytes, len(checked))

    def _checked(self, specs: Sequence[WeightSpec], version: int) -> Sequence[int]:
        """Indices of the weights that this sync verifies."""
        if self.check == "full":
            return range(len(specs))
        if self.check == "sample":
            return sampled_weights([spec.num_bytes for spec in specs], self.bucket_bytes, version)
        return ()

    def _drain(
        self,
        specs: Sequence[WeightSpec],
        gather: Callable[[Sequence[int]], Iterator[WeightBucket]],
        indices: Sequence[int],
        work: Callable[[WeightBucket], None],
        error: Exception | None,
    ) -> Exception | None:
        """Works on each bucket of these weights until an error, and returns it."""
        if not indices:
            return error
        sizes = [specs[i].num_bytes for i in indices]
        may_overlap = overlaps(sizes, self.bucket_bytes, self.engine.staging_bytes)
        # Every rank drains the iterator: each next() is a collective, so an error waits for the end.
        for bucket in gathered_ahead(gather(indices), self._gathers, may_overlap):
            if error is None:
                try:
                    work(bucket)
                except Exception as failure:
                    error = failure
            # The next one may need its memory.
            del bucket
        return error


def _fault_message(faults: Sequence[str], num_verified: int, version: int) -> str:
    names = ", ".join(faults[:_NAMED]) + (f" and {len(faults) - _NAMED} more" if len(faults) > _NAMED else "")
    return (
        f"the engine must hold the weights that were sent, bit by bit: at version {version}, {len(faults)} of "
        f"{num_verified} that were checked differ: {names}. The engine has lost, misplaced or changed them."
    )
