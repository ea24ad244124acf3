"""Imports of much code."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """What is imported inside is never looked through for garbage.

    It is there for good, and with torch and transformers so much that looking takes a quarter of a short run's time.
    """
    num_modules, was_enabled = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # A second time nothing is imported, and what a first run has left may be garbage.
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()
