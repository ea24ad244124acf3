import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightrft.config import DataConfig
from lightrft.datasets.prompts import load_prompts, make_prompts
from lightrft.datasets.sources import Source
from lightrft.types import PromptExample

VOCABULARY = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4, "c": 5}


def tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a word; the template says what the tokenizer adds, `$A` being the text."""
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template is not None:
        words.post_processor = processors.TemplateProcessing(template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "prompts.jsonl")


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightrft"), "propagate", True)
    caplog.set_level(logging.INFO, "lightrft")
    return caplog


def write(path: str, *rows: object) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def data(**values: object) -> DataConfig:
    return DataConfig(prompt_data="", **values)


def prompt_ids(path: str, template: str | None) -> list[list[int]]:
    return [example.prompt_ids for example in load_prompts(path, "train", tokenizer(template), data(), None)]


def test_a_row_becomes_an_example_with_its_other_columns_untouched(path):
    """DATA-04"""
    write(
        path, {"input": "a b", "label": [1, None], "reference": "r", "level": {"x": 1}}, {"input": "c", "label": None}
    )
    dataset = load_prompts(path, "train", tokenizer(), data(), None)
    assert list(dataset) == [
        PromptExample(0, "a b", [3, 4], [1, None], "r", {"level": {"x": 1}}),
        PromptExample(1, "c", [5], None, None, {}),
    ]
    assert len(dataset) == 2 and dataset[-1].row == 1 and dataset.num_filtered == 0


def test_keys_are_those_of_the_config(path):
    write(path, {"question": "a", "answer": 1, "input": "b", "label": 2})
    (example,) = load_prompts(path, "train", tokenizer(), data(input_key="question", label_key="answer"), None)
    assert (example.prompt, example.label, example.extra) == ("a", 1, {"input": "b", "label": 2})


@pytest.mark.parametrize(
    ("template", "ids"), [("<s> $A", [0, 3, 4]), ("<s> $A </s>", [0, 3, 4]), ("$A </s>", [3, 4]), (None, [3, 4])]
)
def test_a_prompt_has_one_bos_if_the_tokenizer_adds_one_and_no_added_eos(template, ids, path):
    """DATA-01"""
    write(path, {"input": "a b", "label": 1})
    assert prompt_ids(path, template) == [ids]


def test_a_bos_in_the_text_is_not_doubled(path):
    """DATA-01"""
    write(path, {"input": "<s> a", "label": 1})
    assert prompt_ids(path, "<s> $A") == [[0, 3]]
    assert prompt_ids(path, None) == [[0, 3]]


def test_long_prompts_are_left_out_with_a_count_and_rows_keep_their_index(path, log):
    """DATA-02: with its BOS, `a b c` has 4 tokens and `a b` has 3."""
    write(path, {"input": "a b c", "label": 1}, {"input": "a b", "label": 2}, {"input": "c c c c", "label": 3})
    dataset = load_prompts(path, "train", tokenizer("<s> $A"), data(prompt_max_len=3), None)
    assert [example.row for example in dataset] == [1]
    assert dataset.num_filtered == 2
    assert log.messages == [f"2 of 3 rows of {path} left out: longer than prompt_max_len=3 tokens"]


def test_truncation_keeps_the_last_tokens_behind_the_bos_with_a_count(path, log):
    """DATA-01, DATA-02: of `<s> a b c b`, 5 tokens, `<s> c b` are left at 3; rewards see the same prompt."""
    write(path, {"input": "a b c b", "label": 1}, {"input": "a b", "label": 2})
    dataset = load_prompts(
        path, "train", tokenizer("<s> $A"), data(prompt_max_len=3, overlong_prompts="truncate"), None
    )
    assert [example.prompt_ids for example in dataset] == [[0, 5, 4], [0, 3, 4]]
    assert [example.prompt for example in dataset] == ["<s> c b", "a b"]
    assert (dataset.num_truncated, dataset.num_filtered) == (1, 0)
    assert log.messages == [f"1 of 2 rows of {path} cut to their last prompt_max_len=3 tokens"]


def test_truncation_without_a_bos_keeps_as_many_tokens(path):
    write(path, {"input": "a b c b", "label": 1})
    for limit, ids in ((1, [4]), (3, [4, 5, 4])):
        truncate = data(prompt_max_len=limit, overlong_prompts="truncate")
        assert load_prompts(path, "train", tokenizer(), truncate, None)[0].prompt_ids == ids
    only_bos = data(prompt_max_len=1, overlong_prompts="truncate")
    assert load_prompts(path, "train", tokenizer("<s> $A"), only_bos, None)[0].prompt_ids == [0]


def test_a_long_prompt_stops_the_run_with_counts_where_that_is_asked_for(path):
    """DATA-02: a prompt of 50 tokens at a limit of 10."""
    write(path, {"input": "a", "label": 1}, {"input": "a " * 50, "label": 2}, {"input": "b " * 20, "label": 3})
    with pytest.raises(ValueError) as caught:
        load_prompts(path, "train", tokenizer(), data(prompt_max_len=10, overlong_prompts="error"), None)
    assert str(caught.value) == (
        f"Prompts must fit into prompt_max_len=10 tokens: 2 of 3 rows of {path} do not, the first of them row 1 with "
        "50. Raise --prompt_max_len, or set --overlong_prompts to filter or truncate."
    )


def test_no_prompt_left_is_an_error_with_the_counts(path):
    """DATA-03"""
    write(path, *[{"input": "a " * 11, "label": 1}] * 20)
    with pytest.raises(ValueError, match=r"0 of 20 rows of .* are left at prompt_max_len=10\."):
        load_prompts(path, "train", tokenizer(), data(prompt_max_len=10), None)
    write(path)
    with pytest.raises(ValueError, match=r"must have rows: .*prompts\.jsonl has none"):
        load_prompts(path, "train", tokenizer(), data(), None)


def test_max_samples_reads_only_the_first_rows(path):
    write(path, {"input": "a", "label": 1}, {"input": "b", "label": 2}, {"no": "prompt"})
    assert [example.label for example in load_prompts(path, "train", tokenizer(), data(), 2)] == [1, 2]


def test_blank_lines_and_a_byte_order_mark_do_no_harm(path):
    Path(path).write_bytes(b'\xef\xbb\xbf{"input": "a", "label": "\xe2\x80\xa8"}\r\n\n{"input": "b", "label": 2}')
    assert [(example.row, example.label) for example in load_prompts(path, "train", tokenizer(), data(), None)] == [
        (0, "\u2028"),
        (2, 2),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "b"}, "no key 'label': it has input. Add it or set --label_key."),
        ({"label": 1, "text": "b"}, "no key 'input': it has label, text. Add it or set --input_key."),
        ({}, "no key 'input': it has none."),
        (["a"], "a row must be an object with columns: got list."),
        ({"input": "", "label": 1}, "'input' must be a text that is not empty: got ''."),
        ({"input": ["b"], "label": 1}, "'input' must be a text that is not empty: got ['b']."),
        ({"input": 5, "label": 1}, "'input' must be a text that is not empty: got 5."),
        (
            {"input": [{"role": "user", "content": "b"}], "label": 1},
            "'input' is a list of messages, which needs the chat template. Add --apply_chat_template.",
        ),
        (
            {"input": "\ud800", "label": 1},
            "'input' must be Unicode text: 'utf-8' codec can't encode character '\\ud800'",
        ),
        ({"input": " ", "label": 1}, "a prompt must have tokens: ' ' has none. Drop the row."),
    ],
)
def test_a_bad_row_is_named_with_its_key_and_the_keys_that_are_there(row, message, path):
    """DATA-04"""
    write(path, {"input": "a", "label": 1}, row)
    with pytest.raises(ValueError) as caught:
        load_prompts(path, "train", tokenizer(), data(), None)
    assert str(caught.value).startswith(f"{path}, row 1 (line 2): {message}")


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"nowhere\.jsonl is no file and no folder"):
        load_prompts("nowhere.jsonl", "train", tokenizer(), data(), None)


def test_rows_are_numbered_through_the_sources_and_keep_their_labels(tmp_path):
    """DATA-04: the second source starts at 3, since line 2 of the first is blank and its last row is row 2."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.csv"
    first.write_text('{"input": "a", "label": 1}\n\n{"input": "b b b", "label": 2}\n')
    second.write_text("input,label,level\nc,3,x\nc c,4,y\n")
    dataset = load_prompts(f"{first}, {second}", "train", tokenizer(), data(prompt_max_len=2), None)
    assert [(example.row, example.label, example.extra) for example in dataset] == [
        (0, 1, {}),
        (3, "3", {"level": "x"}),
        (4, "4", {"level": "y"}),
    ]
    assert (dataset.source_sizes, dataset.num_filtered) == ((1, 2), 1)
    limited = load_prompts(f"{first},{second}", "train", tokenizer(), data(), 1)
    assert [(example.row, example.label) for example in limited] == [(0, 1), (1, "3")]


def test_each_source_needs_a_prompt_that_fits(tmp_path):
    """DATA-03"""
    for name, prompt in (("a", "a"), ("b", "b b b")):
        write(str(tmp_path / f"{name}.jsonl"), *[{"input": prompt, "label": 1}] * 2)
    names = f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"
    with pytest.raises(ValueError, match=r"0 of 2 rows of .*b\.jsonl are left at prompt_max_len=2"):
        load_prompts(names, "train", tokenizer(), data(prompt_max_len=2), None)


def test_a_row_of_a_later_source_is_named_by_its_place_there(tmp_path):
    write(str(tmp_path / "a.jsonl"), {"input": "a", "label": 1}, {"input": "a", "label": 1})
    (tmp_path / "b.csv").write_text("input,label\nb,1\n,2\n")
    with pytest.raises(ValueError, match=r"b\.csv, row 1: 'input' must be a text"):
        load_prompts(f"{tmp_path}/a.jsonl,{tmp_path}/b.csv", "train", tokenizer(), data(), None)


def test_the_split_of_a_folder_is_read(tmp_path):
    write(str(tmp_path / "train.jsonl"), {"input": "a", "label": 1})
    write(str(tmp_path / "test.jsonl"), {"input": "b", "label": 2})
    assert [load_prompts(str(tmp_path), s, tokenizer(), data(), None)[0].label for s in ("train", "test")] == [1, 2]


def test_rows_of_ones_own_become_prompts():
    (example,) = make_prompts([Source("mine", [(0, {"input": "a b", "label": 1})])], tokenizer(), data())
    assert (example.prompt_ids, example.label) == ([3, 4], 1)
    with pytest.raises(ValueError, match=r"mine, row 0: no key 'input': it has 7, label\. Add it"):
        make_prompts([Source("mine", [(0, {7: "a b", "label": 1})])], tokenizer(), data())


def test_batches_of_the_tokenizer_change_nothing(monkeypatch, path):
    write(path, *[{"input": text, "label": 1} for text in ("a", "b b", "c c c", "a b", "c")])
    whole = prompt_ids(path, "<s> $A")
    monkeypatch.setattr("lightrft.datasets.prompt_ids.TOKENIZER_BATCH", 2)
    assert prompt_ids(path, "<s> $A") == whole
