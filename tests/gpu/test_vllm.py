"""vLLM on a GPU, with sleep: the conformance suite at both levels, the log-probs in bf16, and the memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.model import save_qwen2

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("vllm")


def run(*arguments: str, timeout: float = 280) -> str:
    """Output of a Python process of its own: one vLLM that sleeps is all that a process can have."""
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-8000:]
    return ended.stdout


@pytest.mark.parametrize("model", ["Qwen2", "Llama"])
def test_the_engines_suite_holds_at_both_sleep_levels(model: str) -> None:
    """WGT-01 to 04, 07 and MEM-02's order, on tied Qwen2 with biases and untied Llama. One start for both levels."""
    output = run("-m", "pytest", "-q", "-x", "tests/vllm/test_conformance.py", "-k", f"VLLMWith{model}")
    print(output.splitlines()[-1])
    assert " passed" in output and "failed" not in output


def test_log_probs_in_bf16_are_as_near_to_hugging_face_as_those_of_bare_vllm(tmp_path: Path) -> None:
    save_qwen2(tmp_path)
    torch.cuda.empty_cache()
    adapter, bare = (
        float(run("-m", "tests.gpu.vllm_processes", kind, str(tmp_path)).split("mismatch ")[1].split()[0])
        for kind in ("adapter", "bare")
    )
    print(f"mean |log-prob difference| to Hugging Face in bf16: adapter {adapter:.4f}, bare vLLM {bare:.4f}")
    assert adapter <= 0.02 and adapter <= 1.5 * bare
