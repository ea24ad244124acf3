"""The reward model example: its data, settings and report; and, slowly, that both models learn."""

import json
import random
from pathlib import Path

import pytest

from examples.reward_model import prepare as example
from examples.reward_model import tone
from examples.reward_model.report import describe
from lightrft.config import check_config, parse_config
from lightrft.config.preference import check_reward_model_config, parse_reward_model_config
from lightrft.models.loading import load_tokenizer
from tests.distributed.torchrun import torchrun

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/reward_model"
FILES = ("pairs.jsonl", "heldout_pairs.jsonl", "prompts.jsonl", "heldout_prompts.jsonl")


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All files, and a model that has hardly trained."""
    monkeypatch.setattr(example, "STEPS", 1)
    example.prepare(tmp_path / "data", seed=0)
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("reply", "level"),
    [
        ("we are very sorry . we will gladly help you today . have a lovely day !", 3),
        ("stop complaining . someone looks at it . please write again !", 0),
        ("that is your own problem . nobody will help you . go away now .", -3),
        ("we are very sorry . have a lovely day !", None),
        ("we are very sorry . we will gladly help you today . have a lovely day ! thank you", None),
        ("", None),
    ],
)
def test_politeness_is_that_of_the_three_sentences(reply, level):
    assert tone.politeness(reply) == level


def test_a_drawn_reply_has_the_politeness_that_is_said_and_words_of_the_vocabulary():
    rng, words = random.Random(0), set(tone.words())
    for _ in range(100):
        reply, level = tone.draw_reply(rng)
        assert tone.politeness(reply) == level and set(reply.split()) <= words


def test_of_each_pair_the_chosen_answer_is_more_polite_by_ten_margins(data):
    for name in FILES[:2]:
        for row in read_rows(data / name):
            difference = tone.politeness(row["chosen"]) - tone.politeness(row["rejected"])
            assert difference > 0 and row["margin"] == pytest.approx(difference / 10)


def test_no_model_meets_a_complaint_that_is_held_out(data):
    """10 things with 8 troubles are 80 complaints, of which 16 are held out."""
    seen = {name: {row["prompt"] for row in read_rows(data / name)} for name in FILES}
    assert len(seen["prompts.jsonl"]) == 64 and len(seen["heldout_prompts.jsonl"]) == 16
    assert seen["pairs.jsonl"] == seen["prompts.jsonl"] and seen["heldout_pairs.jsonl"] == seen["heldout_prompts.jsonl"]
    assert not seen["prompts.jsonl"] & seen["heldout_prompts.jsonl"]


def test_the_tokenizer_reads_back_with_a_token_for_every_word_and_the_template(data):
    tokenizer = load_tokenizer(str(data / "model"))
    messages = [{"role": "user", "content": "my lamp is lost"}, {"role": "assistant", "content": "regards ."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.split()) and tokenizer.pad_token_id not in ids
    assert tokenizer.decode(ids) == "user : my lamp is lost assistant : regards ."


def test_the_settings_hold_for_two_ranks_and_name_the_files_that_are_made(data):
    flags = ["--pretrain", str(data / "model")]
    names = [str(data / name) for name in FILES]
    pairs = parse_reward_model_config(
        ["--config", str(EXAMPLE / "reward_model.yaml"), *flags, "--train_data", names[0], "--eval_data", names[1]]
    )
    check_reward_model_config(pairs)
    policy = parse_config(
        ["--config", str(EXAMPLE / "policy.yaml"), *flags, "--prompt_data", names[2], "--eval_data", names[3]]
    )
    check_config(policy, world_size=2)
    assert policy.reward.reward_pretrain == f"{pairs.train.save_path}/model"
    assert pairs.data.apply_chat_template and policy.data.apply_chat_template


def test_a_finished_folder_is_left_alone_and_one_of_other_files_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "learn", lambda *_: pytest.fail("made again"))
    example.prepare(data, seed=0)
    with pytest.raises(ValueError, match="--output must be a new folder"):
        example.prepare(tmp_path, seed=0)


def test_the_report_states_pairs_score_and_politeness(tmp_path):
    """Before: levels 3 and -3, mean 0, and one answer of four that is none, and so on."""
    polite = "we are very sorry . we will gladly help you today . have a lovely day !"
    rude = "stop complaining . nobody will help you . go away now ."
    for name, summary in {
        "rm": {"accuracy_before": 0.5, "accuracy_after": 0.99, "steps": 62, "train_seconds": 8.0},
        "policy": {"reward_before": -0.1, "reward_after": 2.0, "steps": 48, "train_seconds": 19.0},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    answers = [(0, polite), (0, rude), (0, "regards"), (0, ""), (48, polite), (48, polite)]
    rows = [{"step": step, "response": response} for step, response in answers]
    (tmp_path / "policy/eval_samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = describe(tmp_path / "rm", tmp_path / "policy").splitlines()
    assert lines[1].split() == ["before", "50.0%"] and lines[2].split()[:2] == ["after", "99.0%"]
    assert lines[-2].split() == ["before", "-0.10", "0.00", "50.0%"]
    assert lines[-1].split()[:4] == ["after", "2.00", "3.00", "0.0%"]


@pytest.mark.slow
def test_the_reward_model_learns_the_pairs_and_its_score_makes_the_policy_polite(tmp_path):
    example.prepare(tmp_path / "data", seed=0)
    names = [str(tmp_path / "data" / name) for name in FILES]
    flags = ["--pretrain", str(tmp_path / "data/model")]
    pairs = ["--config", str(EXAMPLE / "reward_model.yaml"), "--train_data", names[0], "--eval_data", names[1]]
    ended = torchrun(EXAMPLE / "train.py", *pairs, *flags, "--save_path", str(tmp_path / "rm"), timeout=200)
    assert ended.returncode == 0 and ended.left == [], ended.output
    assert json.loads((tmp_path / "rm/summary.json").read_text())["accuracy_after"] >= 0.9
    prompts = ["--config", str(EXAMPLE / "policy.yaml"), "--prompt_data", names[2], "--eval_data", names[3]]
    prompts += ["--reward_pretrain", str(tmp_path / "rm/model"), "--save_path", str(tmp_path / "policy")]
    ended = torchrun(ROOT / "examples/gsm8k_geo3k/train_colocate.py", *prompts, *flags, timeout=250)
    assert ended.returncode == 0 and ended.left == [], ended.output
    before, after = (
        [float(figure) for figure in line.split()[1:3]]
        for line in describe(tmp_path / "rm", tmp_path / "policy").splitlines()[-2:]
    )
    # Its score, and how polite it is.
    assert after[0] > before[0] + 1 and after[1] > before[1] + 1.5
