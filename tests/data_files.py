"""Rows of public data sets, which the repository does not hold: LIGHTRFT_TEST_DATA names their folder."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("LIGHTRFT_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def read_rows(name: str) -> list[dict[str, Any]]:
    """All rows of a .jsonl file; without it the test is skipped."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"needs {path}; LIGHTRFT_TEST_DATA names another folder")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
