"""Fixtures that all tests share."""

import gc
from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no collection of garbage has to look through them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """A persistent pair of gloo rank processes."""
    ranks = Ranks(world_size=2)
    yield ranks
    ranks.close()
