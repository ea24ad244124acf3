"""The Python page on a GPU: one trainer after the other in one process, and a user's loss on CUDA tensors."""

import pytest
import torch

from tests.test_docs import run_page, run_plainly

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_snippet_of_the_python_page_runs_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(tmp_path, run_plainly)
