"""Gathering: whole tensors from the rows that each rank holds, in one collective for many of them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.strategy.utils.collectives import Collectives


@torch.no_grad()
def cast_tensors(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype], device: torch.device) -> list[Tensor]:
    """The tensors on `device` in these dtypes; those that are so already come as views of themselves."""
    results = [tensor.detach() for tensor in tensors]
    for dtype in dict.fromkeys(dtypes):
        changed = [i for i, t in enumerate(results) if dtypes[i] == dtype and (t.dtype != dtype or t.device != device)]
        sizes = [results[i].numel() for i in changed]
        # One block of memory and one operation for all of them: a layer has a dozen tensors, some of them tiny.
        parts = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
        copies = [part.view(results[i].shape) for i, part in zip(changed, parts, strict=True)]
        _copy(copies, [results[i] for i in changed])
        for i, copy in zip(changed, copies, strict=True):
            results[i] = copy
    return results


@torch.no_grad()
def gather_rows(
    shards: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    collectives: Collectives,
) -> list[Tensor]:
    """Whole tensors of `shapes` on `device`, cast, from this rank's rows of each. Every rank must call it.

    Gathering many takes twice their bytes for a moment, gathering one its own.

    Args:
        shards: As `torch.chunk` deals dim 0 over the ranks: all have `ceil(rows / ranks)` rows, but for the last ones,
            which may have fewer or none.
        shapes: Of the whole tensors; none is a number.
        collectives: Of the ranks that hold the shards.
    """
    if collectives.world_size == 1:
        return cast_tensors(shards, dtypes, device)
    whole: list[Tensor | None] = [None] * len(shards)
    for dtype in dict.fromkeys(dtypes):
        members = [i for i in range(len(shards)) if dtypes[i] == dtype]
        gathered = _gather([shards[i] for i in members], [shapes[i] for i in members], dtype, device, collectives)
        for i, tensor in zip(members, gathered, strict=True):
            whole[i] = tensor
    return [tensor for tensor in whole if tensor is not None]


def _gather(
    shards: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    dtype: torch.dtype,
    device: torch.device,
    collectives: Collectives,
) -> list[Tensor]:
    world_size = collectives.world_size
    counts = [-(-shape[0] // world_size) * math.prod(shape[1:]) for shape in shapes]
    rows = torch.empty((world_size, sum(counts)), dtype=dtype, device=device)
    own = rows[collectives.rank].split(counts)
    # Shards are cast before they travel, straight into their place.
    _copy([part[: s.numel()].view(s.shape) for part, s in zip(own, shards, strict=True)], shards)
    collectives.all_gather_rows(rows)
    if len(shards) > 1:
        rows = _by_tensor(rows, counts)
    # Rows of a rank are whole, so those of all ranks follow each other; what stands for absent rows is cut off.
    parts = rows.view(-1).split([world_size * count for count in counts])
    return [part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _by_tensor(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The ranks' rows with those of a tensor together, rank after rank, instead of those of a rank."""
    world_size = len(rows)
    flat = torch.empty_like(rows).view(-1)
    parts = [part.view(world_size, -1) for part in flat.split([world_size * count for count in counts])]
    torch.split_with_sizes_copy(rows, list(counts), dim=1, out=parts)
    return flat


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel()]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
