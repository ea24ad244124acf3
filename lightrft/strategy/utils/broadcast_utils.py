"""Weight synchronisation: the actor's weights, in buckets, into the rollout engine."""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from lightrft.strategy.engine import ManagedEngine
from lightrft.strategy.utils.collectives import Collectives
from lightrft.types import WeightBucket, WeightSpec

BUCKET_BYTES = 512 * 2**20


def bucket_weights(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[WeightBucket]:
    """Groups weights, in their order, into buckets of at most `bucket_bytes`; a larger weight is a bucket alone."""
    bucket: WeightBucket = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


class BroadcastManager:
    """Installs the latest actor weights in the engine, or raises on all ranks alike."""

    def __init__(self, engine: ManagedEngine, collectives: Collectives, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.engine = engine
        self.collectives = collectives
        self.bucket_bytes = bucket_bytes

    def broadcast_to_engine(
        self, specs: Sequence[WeightSpec], weights: Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        """Sends `weights`, whose names and shapes are `specs`; every rank must call it.

        Raises:
            PhaseError: A name or shape that the engine does not know, or a weight of the engine that got no update.
        """
        with self.collectives.collect("weight check"):
            self.engine.begin_weight_update(specs)
        error = self._load(weights)
        with self.collectives.collect("weight sync"):
            if error is not None:
                raise error
            self.engine.finish_weight_update(version)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> Exception | None:
        error = None
        # Every rank drains the iterator: each next() is a collective, so an error waits for the end.
        for bucket in bucket_weights(weights, self.bucket_bytes):
            if error is None:
                try:
                    self.engine.update_weights(bucket)
                except Exception as failure:
                    error = failure
        return error
