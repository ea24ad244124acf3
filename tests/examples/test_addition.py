"""The addition example: what prepare.py writes, with a few steps instead of the whole training."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from adder import answer_accuracy, encode
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.addition import prepare as addition
from examples.addition.report import describe

ROOT = Path(__file__).parents[2]
QUICK = addition.Recipe(
    num_heldout=50,
    learn_batch_size=8,
    learn_check_steps=2,
    learned_accuracy=-1.0,
    spoil_batch_size=8,
    spoil_steps=2,
    spoil_check_steps=1,
    spoiled_accuracy=1.0,
)
"""Two steps of each stage: every accuracy will do."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("addition") / "data"
    addition.prepare(output, QUICK)
    return output


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_tokenizer_loads_and_gives_back_the_very_text(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer("47+85=")["input_ids"]
    # <pad> <eos> 0..9 + =: a digit's id is the digit plus 2.
    assert ids == [6, 9, 12, 10, 7, 13]
    assert tokenizer.decode(ids) == "47+85="
    assert tokenizer.decode([3, 5, 4, 1], skip_special_tokens=True) == "132"
    # A 15th token, such as the one AutoTokenizer adds for a class it does not expect, would have no row in the model.
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (14, 0, 1, None)


def test_the_model_loads_with_as_many_logits_as_tokens(folder):
    """A padded vocabulary would let a fresh model sample ids that have no string."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.num_parameters() == 790_400
    assert model(torch.tensor([[6, 9, 12, 10, 7, 13]])).logits.shape == (1, 6, 14)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)


def test_the_script_finds_the_files_beside_it_from_any_folder(tmp_path):
    command = [sys.executable, ROOT / "examples/addition/prepare.py", "--help"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "--output" in ended.stdout


def test_no_held_out_pair_is_trained_on_and_every_pair_is_used(folder):
    """90 * 90 pairs of two-digit numbers, 50 of them held out."""
    train, heldout = read_rows(folder / "train.jsonl"), read_rows(folder / "heldout.jsonl")
    assert (len(train), len(heldout)) == (8050, 50)
    assert len({row["input"] for row in train + heldout}) == 8100


def test_every_label_is_the_sum(folder):
    for row in read_rows(folder / "train.jsonl") + read_rows(folder / "heldout.jsonl"):
        first, second = row["input"].removesuffix("=").split("+")
        assert row["label"] == str(int(first) + int(second))


def test_a_finished_folder_is_left_alone(folder, monkeypatch):
    before = (folder / "model" / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(addition, "make_model", lambda recipe: pytest.fail("made again"))
    addition.prepare(folder, QUICK)
    assert (folder / "model" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("other", [replace(QUICK, seed=1), replace(QUICK, spoil_steps=3)])
def test_a_folder_of_another_seed_or_recipe_does_not_count_as_prepared(folder, other):
    assert addition.is_prepared(folder, QUICK)
    assert not addition.is_prepared(folder, other)


def test_a_folder_whose_making_was_cut_short_is_made_again(tmp_path, monkeypatch):
    addition.prepare(tmp_path, QUICK)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(addition, "build_tokenizer", interrupt)
        addition.prepare(tmp_path, replace(QUICK, seed=1))
    assert not addition.is_prepared(tmp_path, QUICK)
    addition.prepare(tmp_path, QUICK)
    assert addition.is_prepared(tmp_path, QUICK)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_batch_has_as_many_wrong_answers_as_asked_for():
    pairs = [(47, 85)]
    right = torch.tensor(encode((47, 85), 132))
    assert right.tolist() == [6, 9, 12, 10, 7, 13, 3, 5, 4, 1]
    for wrong_share in (0.0, 1.0):
        batch = addition.draw_batch(pairs, 64, wrong_share, random.Random(0))
        assert (batch != right).any(dim=1).float().mean() == wrong_share


def test_an_answer_counts_only_if_it_ends():
    """A model that always says 3 never says "<eos>" after "33"."""

    class AlwaysThree(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            logits = torch.zeros(*input_ids.shape, 14)
            logits[..., 5] = 1.0
            return type("Output", (), {"logits": logits})

    assert answer_accuracy(AlwaysThree(), [(10, 23)]) == 0.0


def test_learning_that_never_succeeds_says_so():
    recipe = replace(QUICK, max_learn_steps=2, learned_accuracy=1.0)
    with pytest.raises(RuntimeError, match="not learned addition in 2 steps"):
        addition.make_model(recipe)


def test_the_configuration_reads_the_folder_that_the_makefile_prepares():
    makefile, config = (ROOT / "Makefile").read_text(), (ROOT / "examples/addition/addition.yaml").read_text()
    assert "DATA := runs/addition-data\n" in makefile
    flags = yaml.safe_load(config)
    assert [flags[name] for name in ("pretrain", "prompt_data", "eval_data")] == [
        f"runs/addition-data/{name}" for name in ("model", "train.jsonl", "heldout.jsonl")
    ]


def test_the_report_states_accuracy_before_and_after(tmp_path):
    summary = {"steps": 200, "train_seconds": 81.6, "accuracy_before": 0.164, "accuracy_after": 0.912}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    text = describe(tmp_path)
    assert "before  16.4%" in text
    assert "after   91.2%   200 steps in 82 s" in text
    assert str(tmp_path) in text


def test_the_report_of_an_unfinished_run_says_so(tmp_path):
    """One without a summary, and one that a signal has stopped before the last evaluation."""
    with pytest.raises(ValueError, match=r"has a summary\.json"):
        describe(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 7, "stopped_by_signal": 2}))
    command = [sys.executable, ROOT / "examples/addition/report.py", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: The summary must hold accuracy_before, accuracy_after: ")
