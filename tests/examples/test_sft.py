"""The SFT example: its rows, and that a tiny model learns them and is a start for reinforcement learning."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.sft.report import describe
from examples.sft.train import IGNORED, SFTConfig, train, training_rows
from lightrft.config import Config, DataConfig, check_config, parse_config
from lightrft.datasets.prompts import load_prompts
from lightrft.models.loading import load_config, load_generation_config, load_tokenizer
from tests import tiny_models

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if loop.last %}={% endif %}{% endfor %}"
ANSWERS = {"1+2=": "3", "2+2=": "4", "3+4=": "7", "5+1=": "6"}


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> SFTConfig:
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in ANSWERS.items()]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    pretrain = tiny_models.save_model(tmp_path / "base")
    return SFTConfig(
        pretrain,
        data,
        tmp_path / "sft",
        max_len=16,
        batch_size=4,
        micro_batch_size=4,
        learning_rate=1e-2,
        num_epochs=40,
    )


def test_a_tiny_model_learns_the_answers_and_is_taken_by_pretrain(config):
    train(config)
    folder = str(config.save_path)
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert load_config(folder, "auto").hf_config.use_cache and load_generation_config(folder) is not None
    assert model.dtype == torch.float32
    for prompt, answer in ANSWERS.items():
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        generated = model.generate(ids, do_sample=False, max_new_tokens=4)[0, ids.shape[1] :].tolist()
        assert generated == [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]


def test_a_loss_that_is_not_finite_writes_no_model(config):
    with pytest.raises(ValueError, match=r"the loss must stay finite: it was nan .* at learning_rate=1e\+30"):
        train(replace(config, learning_rate=1e30, num_epochs=6))
    assert not config.save_path.exists()


def test_a_folder_that_cannot_be_made_is_told_before_training(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"save_path must be in a folder that .*/file: File exists"):
        train(replace(config, save_path=tmp_path / "file" / "sft"))


def test_a_bf16_run_writes_bf16_weights(config):
    train(replace(config, bf16=True, max_steps=1, micro_batch_size=2, gradient_checkpointing=True))
    assert AutoModelForCausalLM.from_pretrained(config.save_path, dtype="auto").dtype == torch.bfloat16


def test_a_row_is_the_prompt_of_reinforcement_learning_and_the_answer_of_which_only_the_latter_is_learned(config):
    """`1+2=` is 3, 12, 4, 13 in the tiny vocabulary (0 is id 2, + is 12, = is 13), and `3<eos>` is 5, 1."""
    assert training_rows(config, load_tokenizer(config.pretrain))[0] == {
        "input_ids": [3, 12, 4, 13, 5, 1],
        "labels": [IGNORED] * 4 + [5, 1],
    }


def test_prompts_of_a_chat_template_are_the_tokens_that_reinforcement_learning_sees(config, tmp_path):
    """SFT and RL must agree to the token, or RL starts from another distribution."""
    tokenizer = load_tokenizer(config.pretrain)
    tokenizer.chat_template = TEMPLATE
    rows = [{"prompt": [{"role": "user", "content": "1+2"}], "completion": "3", "label": "3"}]
    data = write_rows(tmp_path / "chat.jsonl", rows)
    flags = DataConfig(input_key="prompt", apply_chat_template=True, system_prompt="a")
    [prompt] = load_prompts(data, "train", tokenizer, flags, None)
    [row] = training_rows(replace(config, data=data, system_prompt="a"), tokenizer)
    assert row["input_ids"] == [*prompt.prompt_ids, 5, 1]
    assert prompt.prompt == "a1+2="


def test_a_row_that_is_too_long_is_left_out(config):
    """4 + 2 tokens each; where 5 may be, none is left."""
    tokenizer = load_tokenizer(config.pretrain)
    assert len(training_rows(replace(config, max_len=6), tokenizer)) == 4
    with pytest.raises(ValueError, match="some row must fit into max_len=5 tokens"):
        training_rows(replace(config, max_len=5), tokenizer)


def test_several_ranks_are_refused(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="this example trains in one process: WORLD_SIZE=2"):
        train(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_key": "answer"}, "no key 'answer': it has prompt, completion. Add it or set --label_key"),
        (
            {"label_key": "prompt", "input_key": "completion", "system_prompt": "a"},
            "system_prompt needs a chat template",
        ),
        ({"batch_size": 3, "micro_batch_size": 2}, "batch_size must be a multiple of micro_batch_size: 3, 2"),
        ({"max_len": 65}, "max_len must be within the model's context: 65, 64"),
        ({"input_template": "Q:"}, "input_template must have a {} for the prompt: 'Q:'"),
        ({"num_epochs": 0}, "num_epochs must be at least 1"),
        ({"pretrain": "/absent"}, "the model folder must"),
    ],
)
def test_a_mistake_is_named_before_the_model_is_loaded(config, changes, message):
    with pytest.raises(ValueError, match=message):
        train(replace(config, **changes))


def test_an_answer_that_is_no_text_is_named_with_its_row(config, tmp_path):
    data = write_rows(tmp_path / "bad.jsonl", [{"prompt": "1", "completion": "2"}, {"prompt": "1", "completion": 2}])
    with pytest.raises(ValueError, match="row 1: 'completion' must be a text that is not empty: got 2"):
        training_rows(replace(config, data=data), load_tokenizer(config.pretrain))


def test_a_folder_with_files_is_not_written_over(config):
    config.save_path.mkdir()
    (config.save_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="save_path must be a new folder"):
        train(config)


def script_config(tmp_path: Path, **variables: str) -> Config:
    """What the run script hands to train_colocate.py, seen by a Python that writes its arguments down."""
    for folder in ("run/data", "run/sft"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("train", "test"):
        (tmp_path / "run/data" / f"{name}.jsonl").write_text("{}")
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "RUN": str(tmp_path / "run"), **variables}
    script = ROOT / "examples/sft/run_gsm8k.sh"
    ended = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=30, check=True)
    arguments = json.loads(ended.stdout)
    return parse_config(arguments[arguments.index("examples/gsm8k_geo3k/train_colocate.py") + 1 :])


def test_the_run_script_goes_on_from_the_model_of_sft_with_its_prompts(tmp_path):
    """64 questions x 8 answers are one optimizer step; 7,473 rows are 116 steps of 64 a pass, so 100 fit."""
    config = script_config(tmp_path, ENGINE_TYPE="torch")
    check_config(config, 1)
    assert config.model.pretrain == str(tmp_path / "run/sft")
    assert config.data.apply_chat_template and config.data.system_prompt == "" and config.data.input_key == "prompt"
    rollout = config.rollout
    assert rollout.rollout_batch_size * rollout.n_samples_per_prompt == config.train.train_batch_size == 512
    assert config.evaluation.eval_temperature == 0 and config.train.max_steps == 100


def test_the_report_states_accuracy_before_and_after(tmp_path):
    summary = {"steps": 100, "train_seconds": 212.3, "accuracy_before": 0.05, "accuracy_after": 0.1}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    lines = describe(tmp_path).splitlines()
    assert lines[1].split() == ["after", "SFT", "5.0%"]
    assert lines[2].split()[-6:] == ["10.0%", "100", "steps", "in", "212", "s"]


def test_the_report_draws_the_picture_that_a_flag_names(tmp_path, monkeypatch):
    """As docs/sft.md calls it: the run is given by its place, the picture by its name."""
    (tmp_path / "summary.json").write_text(
        json.dumps({"steps": 2, "train_seconds": 1.0, "accuracy_before": 0.0, "accuracy_after": 0.5})
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.2}\n')
    picture = tmp_path / "pictures" / "curve.png"
    monkeypatch.setattr(sys, "argv", ["report.py", str(tmp_path), "--picture", str(picture)])
    runpy.run_path(str(ROOT / "examples/sft/report.py"), run_name="__main__")
    assert picture.read_bytes().startswith(b"\x89PNG")
