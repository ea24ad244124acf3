"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """A persistent pair of gloo rank processes."""
    ranks = Ranks(world_size=2)
    yield ranks
    ranks.close()
