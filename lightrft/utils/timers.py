"""Seconds that each phase of a step takes."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Timers:
    """Wall seconds per name, summed until they are collected. Device work that is still queued is not waited for."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the block's duration to `name`, also when the block raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def collect(self) -> dict[str, float]:
        """Seconds as `time/<name>` since the last call; starts again from nothing."""
        seconds = {f"time/{name}": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return seconds
