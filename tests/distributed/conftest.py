"""Fixtures that tests of whole runs share."""

from pathlib import Path

import pytest

from tests.distributed.runs import save_task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    save_task(folder)
    return folder
