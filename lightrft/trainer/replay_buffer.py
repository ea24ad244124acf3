"""ReplayBuffer: one step's experiences, on the CPU, and the order in which they are trained on."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lightrft.strategy.utils.devices import storage_bytes
from lightrft.types import Experience

Order: TypeAlias = tuple[int, int]


class ReplayBuffer:
    """Experiences of this rank, with the plan of forwards that scored them."""

    def __init__(self) -> None:
        self.experiences: list[Experience] = []
        self.plan: list[list[int]] = []

    def fill(self, experiences: Sequence[Experience], plan: list[list[int]]) -> None:
        self.experiences = list(experiences)
        self.plan = plan

    def device_bytes(self, device: torch.device) -> int:
        """Bytes of the samples' tensors on this device: they are on the CPU, whatever the rank trains on."""
        values = [value for sample in self.experiences for value in vars(sample).values()]
        mappings = [item for value in values if isinstance(value, Mapping) for item in value.values()]
        return storage_bytes((t for t in (*values, *mappings) if isinstance(t, Tensor)), device)

    def clear(self) -> None:
        self.fill([], [])


def minibatch_orders(orders: Sequence[Order], train_batch_size: int, seed: tuple[int, ...]) -> list[list[Order]]:
    """Samples of each optimizer step: one permutation of all ranks' samples, cut; the last may be smaller.

    Args:
        orders: `Experience.order` of every sample on every rank, in any order.
        seed: What the permutation depends on, besides the samples.
    """
    ordered = sorted(orders)
    if len(ordered) <= train_batch_size:
        return [ordered]
    generator = torch.Generator().manual_seed(hash(seed) % 2**63)  # The hash of a tuple of ints is the same everywhere.
    permuted = [ordered[i] for i in torch.randperm(len(ordered), generator=generator).tolist()]
    return [permuted[i : i + train_batch_size] for i in range(0, len(permuted), train_batch_size)]
