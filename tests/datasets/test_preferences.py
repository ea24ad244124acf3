import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightrft.config import DataConfig
from lightrft.config.preference import PairDataConfig
from lightrft.datasets.preferences import PreferenceDataset, load_pairs
from lightrft.datasets.prompt_ids import tokenize
from lightrft.datasets.prompt_text import prompt_renderer
from lightrft.datasets.reward_text import reward_text
from tests import tiny_models

TEMPLATE = "{% for m in messages %}{{ 'a' if m['role'] == 'user' else 'b' }}{{ m['content'] }}{% endfor %}"


def load(folder: Path, rows: list[Any], template: str | None = None, **flags: Any) -> PreferenceDataset:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = template
    return load_pairs(str(path), "train", tokenizer, replace(PairDataConfig(str(path), max_len=16), **flags), None)


def pair(prompt: Any = "1+1=", chosen: Any = "2", rejected: Any = "3", **columns: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **columns}


def test_a_plain_pair_is_the_prompt_with_each_answer(tmp_path):
    """In the tiny vocabulary 0 is id 2, + is 12 and = is 13."""
    [made] = load(tmp_path, [pair()])
    assert (made.row, made.chosen_ids, made.rejected_ids, made.margin) == (0, [3, 12, 3, 13, 4], [3, 12, 3, 13, 5], 0.0)


def test_a_chat_pair_is_what_a_reward_model_reads_in_reinforcement_learning(tmp_path):
    messages = [{"role": "user", "content": "1+1"}]
    [made] = load(tmp_path, [pair(messages)], TEMPLATE, apply_chat_template=True)
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = TEMPLATE
    prompt = prompt_renderer(tokenizer, DataConfig(input_key="prompt", apply_chat_template=True))(messages)
    text = reward_text(tokenizer, prompt.text, prompt.messages, "2")
    assert text == "a1+1b2"
    assert made.chosen_ids == tokenize([text], tokenizer)[0]


def test_a_text_is_one_message_of_the_user_and_a_system_prompt_comes_before_it(tmp_path):
    template = TEMPLATE.replace("'b'", "('c' if m['role'] == 'system' else 'b')")
    [made] = load(tmp_path, [pair("1")], template, apply_chat_template=True, system_prompt="9")
    assert made.chosen_ids == tokenize(["c9a1b2"], tiny_models.tokenizer())[0]


@pytest.mark.parametrize(("margin", "expected"), [(0.5, 0.5), (None, 0.0), (-1, -1.0), ("0.25", 0.25), ("", 0.0)])
def test_a_margin_is_a_number_or_absent(tmp_path, margin, expected):
    assert load(tmp_path, [pair(margin=margin), pair()])[0].margin == expected


def test_a_margin_key_that_no_row_has_is_refused(tmp_path):
    assert load(tmp_path, [pair(gap=2), pair()], margin_key="gap")[0].margin == 2.0
    with pytest.raises(ValueError, match=r"margin_key must be a column: no row of .* has 'gap'"):
        load(tmp_path, [pair(margin=2)], margin_key="gap")


def test_pairs_of_equal_answers_and_those_that_are_too_long_are_left_out_and_counted(tmp_path):
    """`1+1=` and an answer are 4 + 1 tokens; with 13 characters in either answer 17 > 16."""
    rows = [pair(), pair(rejected="2"), pair(rejected="3" * 13), pair(chosen="2" * 13), pair(rejected="3" * 12)]
    pairs = load(tmp_path, rows)
    assert [one.row for one in pairs] == [0, 4]
    assert (pairs.num_equal, pairs.num_filtered) == (1, 2)


def test_rows_are_numbered_through_several_sources(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(pair()) + "\n")
    names = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    pairs = load_pairs(names, "train", tiny_models.tokenizer(), PairDataConfig(names), None)
    assert [one.row for one in pairs] == [0, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "A source of pairs must have rows"),
        ([pair(), {"prompt": "1", "chosen": "2"}], "row 1 (line 2): no key 'rejected': it has prompt, chosen."),
        ([{"question": "1"}], "no key 'prompt': it has question. Add it or set --prompt_key."),
        ([pair(chosen=2)], "row 0 (line 1): 'chosen' must be a text: got 2."),
        ([pair(rejected=None)], "'rejected' must be a text: got None."),
        ([pair(prompt="")], "'prompt' must be a text that is not empty"),
        ([pair(prompt=[{"role": "user", "content": "1"}])], "Add --apply_chat_template"),
        ([pair(margin="wide")], "'margin' must be a finite number: got 'wide'."),
        ([pair(margin=True)], "'margin' must be a finite number: got True."),
        ([pair(margin=float("inf"))], "'margin' must be a finite number: got inf."),
        ([pair(margin=10**400)], "'margin' must be a finite number: got 1000"),
        (["text"], "a row must be an object with columns: got str."),
        ([pair(rejected="2"), pair(chosen="2" * 13)], "of the 2 rows"),
        ([pair(chosen="\ud800")], "'chosen' must be Unicode text"),
    ],
)
def test_a_mistake_in_the_data_is_named_with_its_row(tmp_path, rows, message):
    with pytest.raises(ValueError) as error:
        load(tmp_path, rows)
    assert message in str(error.value)
