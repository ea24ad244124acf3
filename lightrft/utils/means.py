"""Means: averages of a step, summed up on each rank and merged over ranks."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class Means:
    """Sums and counts by metric name."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, total: float | Tensor, count: float) -> None:
        old_total, old_count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + float(total), old_count + count)

    def add_masked(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Adds the kept entries of `values`, which has the mask's shape."""
        self.add(name, torch.where(mask, values.detach().double(), 0.0).sum(), int(mask.sum()))


def merged_means(all_sums: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Mean of each metric over all ranks; one that no rank counted is left out."""
    totals: dict[str, tuple[float, float]] = {}
    for sums in all_sums:
        for name, (total, count) in sums.items():
            old_total, old_count = totals.get(name, (0.0, 0.0))
            totals[name] = (old_total + total, old_count + count)
    return {name: total / count for name, (total, count) in totals.items() if count}
