"""Devices: which one a rank has, and what is on it for how long."""

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def check_devices() -> None:
    """Raises ValueError when this node has GPUs, but fewer than ranks."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < torch.cuda.device_count() < ranks:
        raise ValueError(
            f"each rank of a node needs a GPU of its own: {ranks} ranks, {torch.cuda.device_count()} GPUs. "
            "Start fewer ranks, or set CUDA_VISIBLE_DEVICES= to run on the CPU."
        )


def rank_device(local_rank: int) -> torch.device:
    """The GPU of this rank, made current, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def empty_cache(device: torch.device) -> None:
    """Gives unused cached memory back; live tensors stay."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def storage_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes that these tensors keep alive on the device; a storage that several share counts once, and whole."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def moved(move_in: Callable[[], None], move_out: Callable[[], None]) -> Iterator[None]:
    """Runs `move_out` at the end whatever happens: an exception leaves nothing on the wrong device."""
    try:
        move_in()
        yield
    finally:
        move_out()
