"""Garbage: what Python's collector need not look through."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_from_collector() -> Iterator[None]:
    """What is alive at its start is not looked through for garbage inside; what comes later is.

    Models, engines and their code are some hundred thousand objects, which take the collector tenths of a second every
    few steps: on each rank at another time, for which all others wait. At the end everything is looked through again,
    what was frozen before as well.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        # A trainer that is dropped is garbage like everything else.
        gc.unfreeze()
