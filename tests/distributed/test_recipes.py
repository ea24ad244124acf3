"""Whole runs whose reward is made of weighted components by label, some of which hang."""

import json
from pathlib import Path

import pytest

from lightrft.config import dump_yaml
from lightrft.trainer import build_trainer
from tests.distributed.runs import make_config, read
from tests.distributed.torchrun import torchrun

GRADERS = """
import time

def even(response, label):
    if sum(map(ord, response)) % 3 == 0:
        time.sleep(600)
    return 1.0

def length(response, per=1.0):
    return len(response) / per
"""
SCRIPT = """
from lightrft.config import parse_config
from lightrft.trainer import build_trainer

# Without `if __name__ == "__main__"`: graders must not run it.
build_trainer(parse_config()).fit()
"""
KILLED = """
import os, pathlib, signal, threading, time

def kill():
    while not pathlib.Path(os.environ["HUNG"]).exists():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=kill, daemon=True).start()
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts with labels `odd` and `even` by turns."""
    rows = [{"input": f"{a}+{b}=", "label": ("even", "odd")[b % 2]} for a in range(4) for b in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "graders.py").write_text(GRADERS)
    return tmp_path


def hangs(response: str) -> bool:
    return sum(map(ord, response)) % 3 == 0


def test_a_run_with_graders_that_hang_trains_counts_them_and_leaves_no_process(task, data):
    """RWD-05: of label `even`, every third response hangs; the others are graded, and the run goes on."""
    even, length = (f"{data}/graders.py:{name}" for name in ("even", "length"))
    recipe = {
        "even": {even: {"weight": 0.5, "ungradable": -1}, length: 0.1},
        "*": {length: {"weight": 1, "per": 10}},
    }
    config = make_config(
        task,
        data / "run",
        data={"prompt_data": str(data / "rows.jsonl")},
        rollout={"rollout_batch_size": 4, "n_samples_per_prompt": 4},
        train={"train_batch_size": 16, "max_steps": 1},
        reward={
            "reward_fn": None,
            "reward_recipe": json.dumps(recipe),
            "reward_workers": 8,
            "reward_timeout_seconds": 1.0,
        },
    )
    (data / "run.yaml").write_text(dump_yaml(config))
    (data / "train.py").write_text(SCRIPT)
    run = torchrun(data / "train.py", "--config", str(data / "run.yaml"))
    assert run.returncode == 0, run.output
    assert run.left == []
    samples = read(config, "samples.jsonl")
    hung = [sample for sample in samples if sample["label"] == "even" and hangs(sample["response"])]
    assert hung
    for sample in samples:
        size = len(sample["response"])
        if sample["label"] == "odd":
            assert sample["reward"] == pytest.approx(size / 10) and "reward/even" not in sample
        else:
            value = -1 if sample in hung else 1
            assert sample["reward"] == pytest.approx(0.5 * value + 0.1 * size)
            assert (sample["reward/even"], sample["reward/length"]) == (value, size)
        assert ("fault/even" in sample) == (sample in hung)
    metrics = read(config, "metrics.jsonl")[-1]
    assert metrics["reward/ungradable"] == len(hung) / len(samples)
    assert metrics["reward/failed"] == metrics["reward/excluded"] == 0
    assert {"reward/even", "reward/length"} <= metrics.keys()


def test_no_grader_outlives_ranks_that_are_killed_while_it_hangs(task, data):
    hung = data / "hung"
    (data / "graders.py").write_text(
        f"import pathlib, time\ndef f(response): pathlib.Path({str(hung)!r}).touch(), time.sleep(600)"
    )
    config = make_config(
        task, data / "run", reward={"reward_fn": f"{data}/graders.py:f", "reward_timeout_seconds": 60.0}
    )
    (data / "run.yaml").write_text(dump_yaml(config))
    (data / "train.py").write_text(KILLED + SCRIPT)
    run = torchrun(data / "train.py", "--config", str(data / "run.yaml"), env={"HUNG": str(hung)}, grace=5)
    assert hung.exists() and run.returncode != 0 and "SIGKILL" in run.output
    assert run.left == []


def test_a_label_without_a_recipe_ends_a_run_before_any_model_loads(task, data, capsys):
    """DATA-04"""
    config = make_config(
        task,
        data / "run",
        data={"eval_data": str(data / "rows.jsonl"), "prompt_data": str(task / "prompts.jsonl")},
        reward={"reward_fn": None, "reward_recipe": "{'0': {exact_match: 1}, '1': {exact_match: 1}}"},
    )
    with pytest.raises(SystemExit) as stop:
        build_trainer(config)
    assert stop.value.code == 2
    message = "error: prompt_data: row 2: a label must have a recipe: '2' has none, reward_recipe has 0, 1. Add it, or "
    assert message in capsys.readouterr().err
    assert not (data / "run").exists()
