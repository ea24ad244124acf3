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
        self, specs: Sequence[WeightSpec], gather: Callable[[], Iterator[WeightBucket]], version: int
    ) -> SyncRecord:
        """Sends the weights; every rank must call it.

        Args:
            specs: Names and shapes of the weights, in their order.
            gather: Gives the weights in the buckets of `plan_buckets`. Each next() is a collective.
            version: Grows by one with each sync, or samples are checked that had their turn.

        Raises:
            PhaseError: A name or shape that the engine does not know, a weight of the engine that got no update, or one
                that the engine does not hold as it was sent.
        """
        started = time.perf_counter()
        with self.collectives.collect("weight check"):
            self.engine.begin_weight_update(specs)
        sizes = [spec.num_bytes for spec in specs]
        sample = sampled_weights(sizes, self.bucket_bytes, version) if self.check == "sample" else []
        names = {specs[i].name for i in sample}
        kept_bytes = self.engine.staging_bytes + sum(sizes[i] for i in sample)
        may_overlap = overlaps(sizes, self.bucket_bytes, kept_bytes)
        kept: WeightBucket = []
        faults: list[str] = []

        def load(bucket: WeightBucket) -> None:
            self.engine.update_weights(bucket)
            kept.extend((name, tensor.clone()) for name, tensor in bucket if name in names)

        def verify(bucket: WeightBucket) -> None:
            faults.extend(self.engine.verify_weights(bucket))

        error = self._drain(gather(), may_overlap, load, None)
        if self.check == "full":
            error = self._drain(gather(), may_overlap, verify, error)
        num_verified = len(specs) if self.check == "full" else len(sample)
        with self.collectives.collect("weight sync"):
            if error is not None:
                raise error
            verify(kept)
            if faults:
                raise RuntimeError(_fault_message(faults, num_verified, version))
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        # On all ranks or on none: those that share an engine finish together.
        with self.collectives.collect("weight sync"):
            self.engine.finish_weight_update(version)
        return SyncRecord(version, time.perf_counter() - started, sum(sizes), num_verified)

    def _drain(
        self,
        buckets: Iterator[WeightBucket],
        may_overlap: Sequence[bool],
        work: Callable[[WeightBucket], None],
        error: Exception | None,
    ) -> Exception | None:
        """Works on each bucket until an error, and returns it."""
        # Every rank drains the iterator: each next() is a collective, so an error waits for the end.
        for bucket in gathered_ahead(buckets, self._gathers, may_overlap):
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
