"""The example of three reward models: what prepare.py writes, with a few steps instead of the whole training."""

import json
from pathlib import Path

import pytest
import torch
from tiny_language import CHARACTERS, TASTES
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.colocated_rewards import prepare as colocated
from examples.colocated_rewards.report import describe
from lightrft.models.loading import load_config
from lightrft.models.reward_model import load_classifier
from tests.distributed.torchrun import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "colocated_rewards"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("colocated") / "data"
    colocated.main(output, num_steps=3)
    return output


def test_each_model_loads_with_a_vocabulary_of_its_own(folder):
    load_config(str(folder / "policy"), "auto")
    ids = [tuple(AutoTokenizer.from_pretrained(folder / name)(CHARACTERS)["input_ids"]) for name in ("policy", *TASTES)]
    assert len(set(ids)) == 4
    for name in TASTES:
        load_classifier(str(folder / name), "auto")
        assert AutoModelForSequenceClassification.from_pretrained(folder / name).num_labels == 1


def test_a_reader_prefers_what_its_name_says():
    """3 of 4 characters are digits, 1 of 4 an exclamation mark, 1 of 4 a comma."""
    assert [TASTES["informative"]("12!3"), TASTES["calm"]("12!3"), TASTES["readable"]("ab,c")] == [0.75, -0.25, 0.0]


def test_models_learn_what_their_readers_prefer(tmp_path):
    """The whole training of one model: nine of ten unseen pairs at least."""
    torch.set_num_threads(1)
    assert colocated.make_reward_model(tmp_path, "calm", seed=2, num_steps=colocated.STEPS) >= 0.9


@pytest.mark.timeout(200)
def test_the_example_runs_and_reports_its_scores_and_its_ledger(folder, tmp_path):
    models = {name: str(folder / name) for name in TASTES}
    flags = {
        "config": EXAMPLE / "colocated_rewards.yaml",
        "pretrain": folder / "policy",
        "prompt_data": folder / "prompts.jsonl",
        "eval_data": folder / "prompts.jsonl",
        "reward_pretrain": json.dumps(models),
        "reward_recipe": EXAMPLE / "recipe.yaml",
        "save_path": tmp_path / "run",
        "max_steps": 1,
    }
    ended = torchrun(EXAMPLE / "train.py", *(f"--{name}={value}" for name, value in flags.items()), timeout=180)
    assert ended.returncode == 0, ended.output
    text = describe(tmp_path / "run")
    for name in TASTES:
        assert f"reward {name} weights" in text
    assert "1 steps in" in text and "length" in text
