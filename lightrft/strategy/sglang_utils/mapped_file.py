"""MediaFile: the large tensors of a rollout's media, written once, which SGLang's schedulers map."""

import io
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_ALIGNMENT = 64


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in the file of a process that has it open."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class MediaFile:
    """Has a place on a disk and no name there: its space is free again once it is closed, or its process has ended, and
    nobody maps it any more. SGLang's schedulers do until their next request, or the next sync."""

    def __init__(self, file: io.RawIOBase, folder: Path) -> None:
        self._file = file
        self._folder = folder
        self._path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        self._end = 0

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator["MediaFile"]:
        """Closed when nobody will map it any more; what is mapped stays."""
        with tempfile.TemporaryFile(buffering=0, dir=folder) as file:
            yield cls(file, folder)

    def add(self, tensor: Tensor) -> StoredTensor:
        """Raises RuntimeError where the disk has no room for it."""
        offset = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        left = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        self._end = offset + len(left)
        try:
            self._file.seek(offset)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise RuntimeError(
                f"images, clips and sounds go to SGLang by a file in {self._folder}: {len(left):,} of its "
                f"{self._end:,} bytes could not be written ({error.strerror}). Set TMPDIR to a folder with more space."
            ) from error
        return StoredTensor(self._path, offset, tuple(tensor.shape), tensor.dtype)


class TensorPlace:
    """A stored tensor in the host's process, which does not read it; the process that it is sent to gets the tensor.

    SGLang would hash and cut a tensor for each sample, and where it has a tokenizer copy it to /dev/shm.
    """

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

    def __reduce__(self) -> tuple[Any, ...]:
        return map_tensor, (self._stored,)


class MappedTensor(Tensor):
    """Travels as its place: the first scheduler sends requests on to the others. What is computed is a plain tensor."""

    stored: StoredTensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return map_tensor, (self.stored,)


_MAPPINGS: "WeakValueDictionary[tuple[int, int], mmap.mmap]" = WeakValueDictionary()
"""By device and inode, which is no other file's while the mapping lives. A process can have some 65,000 of them."""


def map_tensor(stored: StoredTensor) -> MappedTensor:
    """The tensor, in the file's own pages. Writes are seen by who maps it here, in no other process."""
    tensor = torch.frombuffer(
        _mapping(stored.path), dtype=stored.dtype, count=torch.Size(stored.shape).numel(), offset=stored.offset
    )
    mapped = tensor.view(stored.shape).as_subclass(MappedTensor)
    mapped.stored = stored
    return mapped


def _mapping(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino
        mapping = _MAPPINGS.get(key)
        if mapping is None:
            _MAPPINGS[key] = mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        return mapping
    finally:
        os.close(descriptor)
