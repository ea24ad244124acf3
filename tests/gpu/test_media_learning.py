"""Tiny models learn to look and to listen on one GPU in bf16, with the torch engine."""

import json
import os
from pathlib import Path

import pytest
import torch
from answers import Answerer, read_questions, swapped

from examples.look_and_listen import prepare as example
from examples.look_and_listen.report import right_share
from tests.distributed.torchrun import torchrun
from tests.examples.test_look_and_listen import EXAMPLE, chance, flags, write_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
BACKENDS = {"fsdp2": ["--fsdp"], "zero3": ["--no_fsdp", "--zero_stage", "3"]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["dots", "beeps"])
def test_reward_alone_teaches_it_to_answer_by_what_it_sees_or_hears(tmp_path: Path, name: str, backend: str):
    """As on two CPU ranks in fp32; the exported folder, in bf16, answers by its own media."""
    data, model, run = (tmp_path / part for part in ("data", "model", "run"))
    write_data(data, name, num_train=1000 if name == "dots" else 600, num_test=200)
    # As its script does.
    torch.set_num_threads(1)
    example.prepare(data, model, example.Recipe())
    ended = torchrun(
        EXAMPLE / "train.py",
        *flags(name, data, model, run),
        *("--bf16", *BACKENDS[backend]),
        env={"CUDA_VISIBLE_DEVICES": DEVICE},
        launch=("--standalone", "--nproc_per_node=1"),
        timeout=400,
    )
    assert ended.returncode == 0 and ended.left == [], ended.output[-8000:]
    summary = json.loads((run / "summary.json").read_text())
    print(name, backend, summary)
    assert summary["reward_after"] > max(0.8, summary["reward_before"] + 0.4)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(line["rollout/log_prob_mismatch"] for line in lines if line["step"] > 0) < 0.05
    questions = read_questions(data / "test.jsonl")
    answerer = Answerer(run / "model")
    assert right_share(answerer, questions) > 0.85
    assert right_share(answerer, swapped(questions)) < 1.5 * chance(questions)
