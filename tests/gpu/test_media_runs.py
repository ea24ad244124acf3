"""GRPO steps of Qwen2.5-VL-3B and Qwen2-Audio-7B, of random weights, on engines of other packages."""

import json
import os
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.distributed.torchrun import torchrun
from tests.gpu import media_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TRAIN = Path(__file__).parents[2] / "examples/gsm8k_geo3k/train_colocate.py"
STEPS = 2
FLAGS = shlex.split(
    "--fsdp --bf16 --gradient_checkpointing --advantage_estimator group_norm --rollout_batch_size 16 "
    "--n_samples_per_prompt 8 --train_batch_size 128 --max_tokens_per_micro_batch 8192 --prompt_max_len 384 "
    "--generate_max_len 128 --num_episodes 20 --lr_warmup_steps 0 --actor_learning_rate 1e-6 "
    f"--weight_check full --max_steps {STEPS}"
)
# By family: its sizes, its processor, its rows, and further flags. Adam's moments of 7B do not fit beside the rest.
MODELS = {
    "qwen2_5_vl": (
        media_models.QWEN2_5_VL_3B,
        media_models.qwen2_5_vl_processor,
        media_models.save_images,
        ["--init_kl_coef", "0.01", "--engine_mem_util", "0.2"],
    ),
    "qwen2_audio": (
        media_models.QWEN2_AUDIO_7B,
        media_models.qwen2_audio_processor,
        media_models.save_sounds,
        ["--init_kl_coef", "0.0", "--engine_mem_util", "0.3", "--lora_rank", "16", "--lora_alpha", "32"],
    ),
}
BARS = {("qwen2_audio", "sglang"): 0.05}
"""Of the mismatch, where it is not 0.03: two ways to round this decoder are 0.06 apart (`benchmarks/rounding.py`)."""
PHASES = ("generate", "actor", "reference", "train", "sync")


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory) -> tuple[str, Path]:
    root = tmp_path_factory.mktemp(request.param)
    arguments, processor, save_rows, _ = MODELS[request.param]
    media_models.save(root / "model", request.param, arguments, processor)
    torch.cuda.empty_cache()
    save_rows(root)
    return request.param, root


def row_of(family: str, engine: str, steps: Sequence[dict]) -> str:
    """A line for docs/benchmarks.md, with the seconds of the last step."""
    last = steps[-1]
    mismatch = max(step["rollout/log_prob_mismatch"] for step in steps)
    seconds = [f"{last[f'time/{phase}']:.2f}" if f"time/{phase}" in last else "-" for phase in PHASES]
    speed = f"{last['tokens_per_second']:,.0f}"
    cells = [family, engine, str(len(steps)), f"{mismatch:.4f}", f"{last['time/step']:.1f}", *seconds, speed]
    return f"| {' | '.join(cells)} |"


@pytest.mark.timeout(580)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_steps_on_media_keep_the_engine_at_the_actors_log_probs(folder: tuple[str, Path], tmp_path: Path, engine: str):
    """Every weight is verified at each sync; the mismatch stays at the bar or below."""
    if find_spec(engine) is None:
        pytest.skip(f"needs {engine}")
    family, root = folder
    flags = [*FLAGS, *MODELS[family][3], "--engine_type", engine, "--save_path", str(tmp_path)]
    flags += ["--pretrain", str(root / "model"), "--prompt_data", str(root / "prompts.jsonl")]
    flags += ["--reward_fn", f"{root / 'reward.py'}:is_odd"]
    ended = torchrun(
        TRAIN,
        *flags,
        env={"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]},
        launch=("--standalone", "--nproc_per_node=1"),
        timeout=500,
    )
    assert ended.returncode == 0 and ended.left == [], ended.output[-8000:]
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][1:]
    print(row_of(family, engine, steps))
    assert len(steps) == STEPS
    assert max(step["rollout/log_prob_mismatch"] for step in steps) <= BARS.get((family, engine), 0.03)
    assert all(step["train/grad_norm"] > 0 for step in steps)
