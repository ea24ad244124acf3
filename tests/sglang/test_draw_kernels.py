"""The kernels that draw on a GPU, interpreted: they take the ids that `draws` takes on a CPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightrft.strategy.sglang_utils import draws
from tests.sglang.draw_cases import Case, make_cases, not_a_number, sole_weight

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which SGLang brings"),
    pytest.mark.timeout(120),
]


def interpreted(cases: list[Case], folder: Path) -> list[Tensor]:
    torch.save(cases, folder / "cases")
    command = [sys.executable, "-m", "tests.sglang.interpreted_draws", str(folder / "cases"), str(folder / "ids")]
    # Triton reads this when it is imported.
    subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return torch.load(folder / "ids")


def test_they_draw_the_ids_that_one_sum_over_the_vocabulary_draws(tmp_path: Path) -> None:
    """Within a tile, of one, on both sides of its end, and over several."""
    cases = make_cases(rows=48, sizes=[3, 2047, 2048, 2049, 9000])
    for (weights, keys, positions), ids in zip(cases, interpreted(cases, tmp_path), strict=True):
        assert ids.tolist() == draws.drawn(weights, keys, positions).tolist()
        assert weights.gather(-1, ids[:, None].long()).min() > 0


def test_a_row_is_drawn_alike_in_any_batch(tmp_path: Path) -> None:
    [whole] = make_cases(rows=8, sizes=[5000])
    alone: list[Case] = [tuple(part[i : i + 1] for part in whole) for i in range(8)]  # type: ignore[misc]
    ids = interpreted([whole, *alone], tmp_path)
    assert ids[0].tolist() == [one.item() for one in ids[1:]]


def test_a_token_of_weight_0_is_never_drawn_and_nan_gives_one_of_the_vocabulary(tmp_path: Path) -> None:
    sole, nan = interpreted([sole_weight(5000, 4321), not_a_number(5000)], tmp_path)
    assert sole.unique().tolist() == [4321]
    assert nan.min() >= 0 and nan.max() < 5000
