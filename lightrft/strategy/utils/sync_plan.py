"""The plan of a weight sync, from the sizes of the weights: its buckets, which of them overlap, what is checked."""

from collections.abc import Sequence

SAMPLE_WEIGHTS = 16
SAMPLE_BYTES = 64 * 2**20
"""--weight_check sample: weights that a sync checks at most, and the bytes of them, or one weight."""


def plan_buckets(sizes: Sequence[int], bucket_bytes: int) -> list[range]:
    """Runs of weights, in their order, that are gathered and sent together; `sizes` are their bytes.

    Gathering many takes their bytes twice, so a run has half a bucket's bytes at most. A larger weight is alone.
    """
    return _runs_within(sizes, bucket_bytes // 2)


def _runs_within(sizes: Sequence[int], limit: int) -> list[range]:
    runs: list[range] = []
    total = 0
    for i, size in enumerate(sizes):
        total += size
        if runs and total <= limit:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
            total = size
    return runs


def overlaps(sizes: Sequence[int], bucket_bytes: int, staging_bytes: int) -> list[bool]:
    """Of each bucket, whether the next may be gathered while it is loaded.

    A sync takes at most twice `bucket_bytes`, or twice the largest weight, with the `staging_bytes` that the engine
    takes on its own (MEM-04).
    """
    runs = plan_buckets(sizes, bucket_bytes)
    held = [sum(sizes[i] for i in run) for run in runs]
    gathering = [size if len(run) == 1 else 2 * size for run, size in zip(runs, held, strict=True)]
    most = 2 * max([bucket_bytes, *sizes])
    pairs = zip(held[:-1], gathering[1:], strict=True)
    return [staging_bytes + loaded + gathered <= most for loaded, gathered in pairs] + [False]


def sampled_weights(sizes: Sequence[int], bucket_bytes: int, version: int) -> list[int]:
    """Indices of the weights that the sync of this version checks; all have their turn in as many syncs as turns."""
    turns = check_turns(sizes, bucket_bytes)
    return turns[version % len(turns)] if turns else []


def check_turns(sizes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Small samples that share the weights out among them, each from all over the model."""
    stride = -(-len(sizes) // SAMPLE_WEIGHTS)
    limit = min(SAMPLE_BYTES, bucket_bytes // 2)
    turns = []
    for start in range(stride):
        members = range(start, len(sizes), stride)
        turns += [[members[k] for k in run] for run in _runs_within([sizes[i] for i in members], limit)]
    return turns
