"""Garbage: when Python's collector looks through everything."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEPS = 100
"""Between two looks through everything."""
NEVER = 2**31 - 1
"""The largest threshold."""


@contextmanager
def full_collections_by_step() -> Iterator[Callable[[int], None]]:
    """Inside, only young objects are looked through for garbage by themselves, and all of them by what this gives.

    Models, engines and their code are some hundred thousand objects, which take the collector tenths of a second every
    few steps: on each rank at another time, for which all others wait. Called with the number of each step, it looks
    through everything after every hundredth, on all ranks at once.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)

    def collect(step: int) -> None:
        if step % STEPS == 0:
            gc.collect()

    try:
        yield collect
    finally:
        gc.set_threshold(young, middle, old)
