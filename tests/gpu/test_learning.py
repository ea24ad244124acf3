"""A reward model from pairs, and SFT, on one GPU in bf16."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from examples.reward_model import prepare as tone
from examples.sft.train import SFTConfig, train
from tests import tiny_models
from tests.distributed.torchrun import torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXAMPLE = Path(__file__).parents[2] / "examples/reward_model"
BACKENDS = {"fsdp2": ["--fsdp"], "zero3": ["--no_fsdp", "--zero_stage", "3"]}
DEVICE = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tone") / "data"
    tone.prepare(folder, seed=0)
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reward_model_learns_the_pairs_in_bf16(data: Path, tmp_path: Path, backend: str):
    flags = ["--config", str(EXAMPLE / "reward_model.yaml"), "--pretrain", str(data / "model"), "--bf16"]
    flags += ["--train_data", str(data / "pairs.jsonl"), "--eval_data", str(data / "heldout_pairs.jsonl")]
    ended = torchrun(
        EXAMPLE / "train.py",
        *flags,
        *BACKENDS[backend],
        *("--save_path", str(tmp_path)),
        env={"CUDA_VISIBLE_DEVICES": DEVICE},
        launch=("--standalone", "--nproc_per_node=1"),
        timeout=200,
    )
    assert ended.returncode == 0 and ended.left == [], ended.output[-8000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    print(backend, summary)
    assert summary["accuracy_after"] >= 0.9
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", dtype="auto")
    assert model.dtype == torch.bfloat16


def test_sft_learns_in_bf16(tmp_path: Path):
    answers = {f"{a}+{b}=": str(a + b) for a in range(1, 5) for b in range(1, 5)}
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in answers.items()]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pretrain = tiny_models.save_model(tmp_path / "base", tiny_models.qwen2(hidden_size=128, intermediate_size=256))
    settings = {"max_len": 16, "batch_size": 16, "micro_batch_size": 8, "bf16": True}
    config = SFTConfig(pretrain, str(tmp_path / "rows.jsonl"), tmp_path / "sft", num_epochs=150, **settings)
    short = SFTConfig(pretrain, str(tmp_path / "rows.jsonl"), tmp_path / "short", num_epochs=1, **settings)
    assert train(config) < train(short) - 1.0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "sft", dtype="auto").dtype == torch.bfloat16
