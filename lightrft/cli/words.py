"""Words: counts and bytes as an explanation writes them."""

import torch

from lightrft.strategy.utils.distributed_util import local_share

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"


def on_each_rank(count: int, world_size: int) -> str:
    most, fewest = (len(local_share(count, rank, world_size)) for rank in (0, world_size - 1))
    return f"{most:,} on each rank" if most == fewest else f"{fewest:,} or {most:,} on each rank"


def per_rank(count: int | None, bytes_each: int, shards: int) -> str:
    return "unknown size" if count is None else f"{size(count * bytes_each / shards)} a rank"


def size(num_bytes: float) -> str:
    """`1.5 GiB`"""
    unit, divisor = next((u for u in UNITS if num_bytes >= u[1]), ("bytes", 1))
    return f"{num_bytes / divisor:,.1f} {unit}" if divisor > 1 else f"{num_bytes:,.0f} bytes"


def millions(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.2f} M" if count >= 1e4 else f"{count:,}"


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
