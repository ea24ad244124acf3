"""Fixtures that tests of whole runs share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks
from tests.distributed.runs import save_task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    save_task(folder)
    return folder


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    """A persistent process of its own, the only rank."""
    ranks = Ranks(world_size=1)
    yield ranks
    ranks.close()
