"""Draw kernels: `draws.drawn` on a GPU in two launches, written in Triton, which CUDA builds of PyTorch bring."""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from lightrft.utils.sampling_key import GOLDEN, MIXERS

_GOLDEN, _MIXER_0, _MIXER_1 = tl.constexpr(GOLDEN), tl.constexpr(MIXERS[0]), tl.constexpr(MIXERS[1])
_UNIT = tl.constexpr(2.0**-53)
_BELOW_1 = tl.constexpr(1 - 2.0**-52)
_TILE = 2048
"""Neighbours in the vocabulary that are summed first; those among which the draw falls are read again."""


def drawn(weights: Tensor, mixed_keys: Tensor, positions: Tensor) -> Tensor:
    """Token ids `(B,)`, int32: see `draws.drawn`. Each row is summed in the same order in any batch."""
    num_rows, size = weights.shape
    num_tiles = triton.cdiv(size, _TILE)
    weights = weights.contiguous()
    sums = torch.empty((num_rows, num_tiles), dtype=torch.float64, device=weights.device)
    ids = torch.empty(num_rows, dtype=torch.int32, device=weights.device)
    _sum_tiles[(num_rows, num_tiles)](weights, sums, size, TILE=_TILE)  # pyright: ignore[reportIndexIssue]
    _find[(num_rows,)](  # pyright: ignore[reportIndexIssue]
        weights, sums, mixed_keys.contiguous(), positions.contiguous(), ids, size, num_tiles,
        TILE=_TILE, TILES=triton.next_power_of_2(num_tiles),
    )  # fmt: skip
    return ids


@triton.jit
def _sum_tiles(weights, sums, size, TILE: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    values = tl.load(weights + row * size + columns, columns < size, 0.0).to(tl.float64)
    tl.store(sums + row * tl.num_programs(1) + tile, tl.sum(values))


@triton.jit
def _find(weights, sums, mixed_keys, positions, ids, size, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    uniform = _uniform(tl.load(mixed_keys + row), tl.load(positions + row))
    tiles = tl.arange(0, TILES)
    tile_sums = tl.load(sums + row * num_tiles + tiles, tiles < num_tiles, 0.0)
    cdf = tl.cumsum(tile_sums)
    tile = _passed(tile_sums, cdf, uniform * tl.max(cdf), tiles)
    before = tl.sum(tl.where(tiles < tile, tile_sums, 0.0))
    columns = tile * TILE + tl.arange(0, TILE)
    values = tl.load(weights + row * size + columns, columns < size, 0.0).to(tl.float64)
    tl.store(ids + row, _passed(values, tl.cumsum(values), uniform * tl.max(cdf) - before, columns))


@triton.jit
def _passed(values, cdf, target, places):
    """The first of the places that have a weight at which the sum is above the target, or the last of them."""
    target = tl.minimum(target, tl.max(cdf) * _BELOW_1)
    last = tl.max(tl.where(values > 0, places, 0))
    # Sums of a parallel scan may fall by their last bit where there is no weight.
    return tl.min(tl.where((values > 0) & (cdf > target), places, last))


@triton.jit
def _uniform(mixed_key, position):
    """As `sampling.uniforms_from`."""
    state = mixed_key.to(tl.uint64) + (position.to(tl.uint64) + 1) * _GOLDEN
    state = (state ^ (state >> 30)) * _MIXER_0
    state = (state ^ (state >> 27)) * _MIXER_1
    state = state ^ (state >> 31)
    return (state >> 11).to(tl.float64) * _UNIT
