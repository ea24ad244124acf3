"""Cases for the two ways to draw: weights `(B, V)`, mixed keys and positions `(B,)`."""

import torch
from torch import Tensor

Case = tuple[Tensor, Tensor, Tensor]


def make_cases(rows: int, sizes: list[int]) -> list[Case]:
    """Skewed weights of which a third is 0, among large and negative keys."""
    numbers = torch.Generator().manual_seed(0)
    cases = []
    for size in sizes:
        weights = torch.rand(rows, size, generator=numbers) ** 8
        weights[:, ::3] = 0
        keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=numbers)
        cases.append((weights, keys, torch.randint(0, 100_000, (rows,), generator=numbers)))
    return cases


def sole_weight(size: int, place: int) -> Case:
    """Of a token that is drawn by every number, however small its weight."""
    weights = torch.zeros(256, size)
    weights[:, place] = 1e-30
    return weights, torch.arange(256), torch.arange(256)


def not_a_number(size: int) -> Case:
    return torch.full((2, size), torch.nan), torch.arange(2), torch.arange(2)
