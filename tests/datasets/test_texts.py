import json

import pytest

from lightrft.datasets.texts import load_texts
from tests.tiny_models import tokenizer


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_text_is_its_tokens_and_an_end_token_cut_to_the_limit(tmp_path):
    """`1+2` is three tokens; the empty text has nothing to predict but the end, which is its first token."""
    end = tokenizer().eos_token_id
    path = write(tmp_path / "texts.jsonl", [{"input": "1+2"}, {"input": ""}, {"input": "1234567"}])
    first, second = load_texts(path, "train", tokenizer(), "input", max_len=6)
    assert (len(first), first[-1]) == (4, end)
    assert len(second) == 6 and end not in second


def test_rows_without_a_text_are_refused_with_their_place(tmp_path):
    path = write(tmp_path / "texts.jsonl", [{"input": "1"}, {"text": "1"}])
    with pytest.raises(ValueError, match=r"row 1 \(line 2\): a text must stand under 'input': got NoneType\."):
        load_texts(path, "train", tokenizer(), "input", 8)


def test_texts_of_which_none_can_be_learned_are_refused(tmp_path):
    path = write(tmp_path / "texts.jsonl", [{"input": ""}])
    with pytest.raises(ValueError, match=r"^Texts must have tokens to predict: .* has none in 1 rows\."):
        load_texts(path, "train", tokenizer(), "input", 8)
