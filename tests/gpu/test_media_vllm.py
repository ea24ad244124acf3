"""Images, clips and sounds on vLLM with sleep and CUDA graphs: the media suite, a process for each family."""

import pytest
import torch

from tests.gpu.test_vllm import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5VL", "Qwen3VL", "InternVL", "Qwen2Audio"])
def test_the_media_suite_holds_at_sleep_level_2(family: str) -> None:
    """WGT-01, 03, 04 and 06: the tower's weights too, and what it made of an item, are those of the last sync."""
    output = run("-m", "pytest", "-q", "-x", "tests/vllm/test_media.py", "-k", f"Test{family}", timeout=380)
    print(output.splitlines()[-1])
    assert " passed" in output and "failed" not in output
