"""Imports of much code."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """What is imported inside is never looked through for garbage, once in a process.

    It is there for good, and with torch and transformers so much that looking takes a quarter of a short run's time.
    What else is alive then is not looked through either: of that, cycles stay when they are dropped later.
    """
    num_modules, was_enabled = len(sys.modules), gc.isenabled()
    is_first = gc.get_freeze_count() == 0
    if is_first:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if is_first and len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()
