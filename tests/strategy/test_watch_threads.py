"""What the watch leaves behind in its own process; `tests/distributed/test_watch.py` has what it says of others."""

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from lightrft.strategy.utils.trace import CollectiveTrace
from lightrft.strategy.utils.watch import DesyncWatch


class _SlowStore:
    """A real store, one of whose reads takes as long as on a machine that swaps."""

    def __init__(self, store: dist.TCPStore, delay_seconds: float) -> None:
        self._store = store
        self._delay_seconds = delay_seconds

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        time.sleep(self._delay_seconds)
        return self._store.multi_get(keys)


def test_no_thread_is_left_in_the_store_when_the_watch_has_stopped():
    """A thread that returns from C++ into a Python that shuts down ends the process by `terminate called`."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    for rank in range(2):
        store.set(f"state/{rank}", "{}")
    before = set(threading.enumerate())
    watch = DesyncWatch(CollectiveTrace(), 0, 2, _SlowStore(store, delay_seconds=2.0), timeout_seconds=2.0)
    watch.start()
    watch.stop()
    assert set(threading.enumerate()) <= before
