"""Prefetch: the next bucket of weights is gathered while the caller works on one."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat

import torch

from lightrft.types import WeightBucket


def gathered_ahead(
    buckets: Iterator[WeightBucket], gathers: torch.cuda.Stream | None, may_overlap: Sequence[bool]
) -> Iterator[WeightBucket]:
    """The buckets; on a CUDA device they are gathered on a stream of their own, at most one ahead.

    The caller drops a bucket before it asks for the next, and its work on it is on the device's current stream.

    Args:
        gathers: That stream, always the same one, whose memory is used again; None on the CPU.
        may_overlap: Of each bucket, whether there is memory for the next one beside it.
    """
    if gathers is None:
        yield from buckets
        return
    loads = torch.cuda.current_stream(gathers.device)
    # The optimizer step that made the weights may still be running.
    gathers.wait_stream(loads)
    ahead = deque(_next_on(gathers, buckets))
    for overlaps in chain(may_overlap, repeat(False)):
        if not ahead:
            break
        gathered = gathers.record_event()
        # It is gathered into the memory of the bucket before this one, whose loads `gathers` has waited for.
        if overlaps:
            ahead.extend(_next_on(gathers, buckets))
        loads.wait_event(gathered)
        yield ahead.popleft()
        gathers.wait_stream(loads)
        if not ahead:
            ahead.extend(_next_on(gathers, buckets))
    # Later work on the current stream may change the weights that are still being read.
    loads.wait_stream(gathers)


def _next_on(stream: torch.cuda.Stream, buckets: Iterator[WeightBucket]) -> list[WeightBucket]:
    with torch.cuda.stream(stream):
        return list(islice(buckets, 1))
