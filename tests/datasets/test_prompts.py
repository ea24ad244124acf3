import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightrft.config import DataConfig
from lightrft.datasets.prompts import load_prompts
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


def write(path: str, *rows: object) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def data(**values: object) -> DataConfig:
    return DataConfig(prompt_data="", **values)


def prompt_ids(path: str, template: str | None) -> list[list[int]]:
    return [example.prompt_ids for example in load_prompts(path, tokenizer(template), data(), None)]


def test_a_row_becomes_an_example_with_its_other_columns_untouched(path):
    """DATA-04"""
    write(
        path, {"input": "a b", "label": [1, None], "reference": "r", "level": {"x": 1}}, {"input": "c", "label": None}
    )
    dataset = load_prompts(path, tokenizer(), data(), None)
    assert list(dataset) == [
        PromptExample(0, "a b", [3, 4], [3, 4], [1, None], "r", {"level": {"x": 1}}),
        PromptExample(1, "c", [5], [5], None, None, {}),
    ]
    assert len(dataset) == 2 and dataset[-1].row == 1 and dataset.num_filtered == 0


def test_keys_are_those_of_the_config(path):
    write(path, {"question": "a", "answer": 1, "input": "b", "label": 2})
    (example,) = load_prompts(path, tokenizer(), data(input_key="question", label_key="answer"), None)
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


def test_long_prompts_are_left_out_with_a_count_and_rows_keep_their_index(path, caplog, monkeypatch):
    """DATA-02: with its BOS, `a b c` has 4 tokens and `a b` has 3."""
    monkeypatch.setattr(logging.getLogger("lightrft"), "propagate", True)
    caplog.set_level(logging.INFO, "lightrft")
    write(path, {"input": "a b c", "label": 1}, {"input": "a b", "label": 2}, {"input": "c c c c", "label": 3})
    dataset = load_prompts(path, tokenizer("<s> $A"), data(prompt_max_len=3), None)
    assert [example.row for example in dataset] == [1]
    assert dataset.num_filtered == 2
    assert caplog.messages == ["2 of 3 prompts left out: longer than prompt_max_len=3 tokens"]


def test_no_prompt_left_is_an_error_with_the_counts(path):
    """DATA-03"""
    write(path, *[{"input": "a " * 11, "label": 1}] * 20)
    with pytest.raises(ValueError, match=r"0 of 20 rows of .* are left at prompt_max_len=10\."):
        load_prompts(path, tokenizer(), data(prompt_max_len=10), None)
    write(path)
    with pytest.raises(ValueError, match="0 of 0 rows"):
        load_prompts(path, tokenizer(), data(), None)


def test_max_samples_reads_only_the_first_rows(path):
    write(path, {"input": "a", "label": 1}, {"input": "b", "label": 2}, {"no": "prompt"})
    assert [example.label for example in load_prompts(path, tokenizer(), data(), 2)] == [1, 2]


def test_blank_lines_and_a_byte_order_mark_do_no_harm(path):
    Path(path).write_bytes(b'\xef\xbb\xbf{"input": "a", "label": "\xe2\x80\xa8"}\r\n\n{"input": "b", "label": 2}')
    assert [(example.row, example.label) for example in load_prompts(path, tokenizer(), data(), None)] == [
        (0, "\u2028"),
        (2, 2),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "b"}, "row 1 (line 2): no key 'label': it has input. Add it or set --label_key."),
        ({"label": 1, "text": "b"}, "row 1 (line 2): no key 'input': it has label, text. Add it or set --input_key."),
        ({}, "row 1 (line 2): no key 'input': it has none."),
        (["a"], "row 1 (line 2): a row must be a JSON object: got list."),
        ({"input": "", "label": 1}, "row 1 (line 2): 'input' must be a text that is not empty: got ''."),
        ({"input": ["b"], "label": 1}, "row 1 (line 2): 'input' must be a text that is not empty: got ['b']."),
        ({"input": " ", "label": 1}, "A prompt must have tokens: row 1"),
    ],
)
def test_a_bad_row_is_named_with_its_key_and_the_keys_that_are_there(row, message, path):
    """DATA-04"""
    write(path, {"input": "a", "label": 1}, row)
    with pytest.raises(ValueError) as caught:
        load_prompts(path, tokenizer(), data(), None)
    assert message in str(caught.value)


def test_bad_json_is_named_by_its_line(path):
    for line in ('{"input": "a", ', b"\xff"):
        content = line if isinstance(line, bytes) else line.encode()
        Path(path).write_bytes(b'{"input": "a", "label": 1}\n\n' + content)
        with pytest.raises(ValueError, match=f"{path} must hold one JSON object a line: line 3: "):
            load_prompts(path, tokenizer(), data(), None)


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"nowhere\.jsonl is no file"):
        load_prompts("nowhere.jsonl", tokenizer(), data(), None)
