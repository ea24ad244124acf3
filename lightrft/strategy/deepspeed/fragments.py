"""Fragments: where a weight's fp32 master and its moments lie in the flat memory of DeepSpeed's optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrft.strategy.utils.collectives import Collectives

Entry: TypeAlias = Literal["master", "exp_avg", "exp_avg_sq"]
MOMENTS: tuple[Entry, ...] = ("exp_avg", "exp_avg_sq")
ENTRIES: tuple[Entry, ...] = ("master", *MOMENTS)


@dataclass(frozen=True)
class Fragment:
    """This rank's part of one weight: elements that follow each other, or none."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    """Of the whole weight."""
    flat: Tensor | None
    """The optimizer's own parameter: masters of parts of many weights. None where this rank has no part."""
    offset: int = 0
    """First element there."""
    start: int = 0
    """First element in the flattened weight."""
    count: int = 0

    def part(self, entry: Entry, optimizer: Optimizer) -> Tensor | None:
        """`(count,)`, as a view."""
        if self.flat is None:
            return None
        memory = self.flat.detach() if entry == "master" else optimizer.state[self.flat][entry]
        return memory.narrow(0, self.offset, self.count)


def fragments_of(engine: Any, optimizer: Optimizer) -> list[Fragment]:
    """One for each weight that learns, in the model's order, on every rank.

    Args:
        engine: A DeepSpeedEngine.
        optimizer: The one that the engine was made with.
    """
    learning = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    if engine.zero_optimization_stage() == 3:
        return [_equal_part(name, p, engine.optimizer) for name, p in learning]
    return [_linked_part(name, p, optimizer) for name, p in learning]


def flats_of(engine: Any, optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's own parameters."""
    if engine.zero_optimization_stage() == 3:
        # It has them in its groups only while it steps.
        return list(engine.optimizer.fp32_partitioned_groups_flat)
    return [flat for group in optimizer.param_groups for flat in group["params"]]


def _equal_part(name: str, parameter: Any, zero: Any) -> Fragment:
    """ZeRO-3 cuts each weight into as many equal parts as there are ranks; the last ones may be padded."""
    group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
    start = dist.get_rank() * size
    count = max(0, min(size, parameter.ds_numel - start))
    flat = zero.fp32_partitioned_groups_flat[group]
    return Fragment(name, parameter, parameter.ds_shape, flat, offset, start, count)


def _linked_part(name: str, parameter: Any, optimizer: Optimizer) -> Fragment:
    """ZeRO-1 and 2 lay the weights of a group one after the other, and cut that into as many parts as ranks."""
    link = parameter._hp_mapping
    if link is None:
        return Fragment(name, parameter, parameter.shape, None)
    [flat] = optimizer.param_groups[link.param_group_index]["params"]
    there, here = link.hp_fragment_address, link.lp_fragment_address
    return Fragment(name, parameter, parameter.shape, flat, there.start, here.start, here.numel)


def whole_tensors(
    fragments: Sequence[Fragment],
    entry: Entry,
    optimizer: Optimizer,
    collectives: Collectives,
) -> list[Tensor]:
    """fp32 tensors of the weights' shapes, on the device, from the parts on all ranks. Every rank must call it."""
    sizes = [fragment.shape.numel() for fragment in fragments]
    flat = torch.zeros(sum(sizes), device=collectives.device)
    for fragment, whole in zip(fragments, flat.split(sizes), strict=True):
        part = fragment.part(entry, optimizer)
        if part is not None:
            whole[fragment.start : fragment.start + fragment.count].copy_(part)
    # Each element is on one rank, and 0 on the others: the sum is exact.
    collectives.all_reduce(flat)
    return [whole.view(fragment.shape) for fragment, whole in zip(fragments, flat.split(sizes), strict=True)]


def keep_parts(fragments: Sequence[Fragment], entry: Entry, optimizer: Optimizer, wholes: Sequence[Tensor]) -> None:
    """Copies this rank's part of each whole tensor to its place."""
    for fragment, whole in zip(fragments, wholes, strict=True):
        part = fragment.part(entry, optimizer)
        if part is not None:
            part.copy_(whole.reshape(-1)[fragment.start : fragment.start + fragment.count])
