"""ProcessGroups: the process group of a run, and an earlier one while its inputs are checked."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lightrft.strategy.utils.collectives import Collectives

_numbers = count()
"""Of the groups that this process joins, one after the other; ranks join equally many."""


class ProcessGroups:
    """Default groups of this process, which torchrun's variables describe."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._store: dist.Store | None = None

    def join(self, backend: str, device_id: torch.device | None = None) -> None:
        """Every rank must call it."""
        if self._store is None:
            # Kept: where rank 0 serves it, ranks that make their next group early would meet in one that is closing.
            self._store, _, _ = next(rendezvous("env://", timeout=self._timeout))
        # torchrun's store still holds what an earlier group of these processes wrote: a later one would wait for ever.
        store = dist.PrefixStore(f"lightrft/{next(_numbers)}", self._store)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=self._timeout, device_id=device_id
        )

    @contextmanager
    def early_collectives(self) -> Iterator[Collectives]:
        """Collectives on the CPU, before the run's group is joined. Every rank must enter and leave it.

        Their group ends with the context, however that ends: a mistake that is found before models are loaded leaves
        none behind, and no device was touched.
        """
        owns_group = not dist.is_initialized()
        report = sys.excepthook
        if owns_group:
            self.join("gloo")
        try:
            yield Collectives(torch.device("cpu"))
        finally:
            if owns_group:
                dist.destroy_process_group()
                # Every group writes the rank's number once more before each line of a traceback.
                sys.excepthook = report
