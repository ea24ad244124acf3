import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet

from lightrft.config.sources import FILE_ENDINGS
from lightrft.datasets.sources import READERS, Source, read_source

ROWS = [{"input": "a", "label": "007"}, {"input": "b", "label": "1,0"}]


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def rows(name: object, split: str = "train", max_rows: int | None = None) -> list[tuple[int, object]]:
    return list(read_source(str(name), split, max_rows).rows)


def error(name: object, split: str = "train") -> str:
    with pytest.raises(ValueError) as caught:
        read_source(str(name), split)
    return str(caught.value)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """The same two rows in each form."""
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    return {
        "lines": write(tmp_path / "a.jsonl", lines),
        "list": write(tmp_path / "a.json", json.dumps(ROWS, indent=1)),
        "lines that are called json": write(tmp_path / "b.json", lines),
        "csv": write(tmp_path / "a.csv", 'input,label\na,007\nb,"1,0"\n'),
        "parquet": str(tmp_path / "a.parquet"),
        "upper case": write(tmp_path / "A.CSV", 'input,label\na,007\nb,"1,0"\n'),
    }


def test_every_file_form_gives_the_same_rows_and_labels_keep_their_digits(files):
    """DATA-04"""
    for name in files.values():
        assert rows(name) == list(enumerate(ROWS))
        assert rows(name, max_rows=1) == [(0, ROWS[0])]
        assert rows(name, max_rows=9) == list(enumerate(ROWS))


def test_the_known_endings_are_those_of_the_config():
    assert tuple(READERS) == FILE_ENDINGS


def test_a_place_names_its_line_where_rows_are_lines(files):
    assert read_source(files["lines"], "train").where(1) == f"{files['lines']}, row 1 (line 2)"
    assert read_source(files["lines that are called json"], "train").has_lines
    assert read_source(files["list"], "train").where(1) == f"{files['list']}, row 1"
    assert Source("given", [(0, {})]).where(0) == "given, row 0"


def test_parquet_keeps_messages_numbers_and_nulls(tmp_path):
    row = {"prompt": [{"role": "user", "content": "a"}], "label": 7, "level": None, "parts": [1.5]}
    parquet.write_table(pyarrow.Table.from_pylist([row] * 3), tmp_path / "a.parquet", row_group_size=1)
    assert rows(tmp_path / "a.parquet") == [(0, row), (1, row), (2, row)]


def test_json_values_keep_the_types_that_they_have_in_each_row(tmp_path):
    mixed = [{"label": [1, None]}, {"label": "x", "more": {"y": 1}}, {}]
    assert rows(write(tmp_path / "a.json", json.dumps(mixed))) == list(enumerate(mixed))


def test_a_long_field_of_a_csv_file_is_read(tmp_path):
    """Python's own limit is 131,072 characters."""
    long = "a" * 200_000
    assert rows(write(tmp_path / "a.csv", f"input\n{long}\n")) == [(0, {"input": long})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "one JSON object a line, in UTF-8: line 2: Expecting value, column 6. "),
        ("a.jsonl", b'{"a": 1}\n\n{"a": "\xff"}', "line 3: 'utf-8' codec can't decode byte 0xff"),
        ("a.jsonl", b'{"a": "\xed\xa0\x80"}', "line 1: 'utf-8' codec can't decode byte 0xed"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), "line 1: 'utf-8' codec can't decode byte 0xff"),
        ("a.json", b'[{"a": 1}, ', "must hold a JSON list of objects, in UTF-8: Expecting value: line 1 column 12"),
        ("a.json", b'[{"a": "\xff"}]', "must hold a JSON list of objects, in UTF-8: 'utf-8' codec can't decode"),
        ("a.json", b'{\n"a": 1}', "must hold one JSON object a line, in UTF-8: line 1: Expecting property name"),
        ("a.jsonl", b"[" * 100_000, "must hold one JSON object a line, in UTF-8: line 1: maximum recursion depth"),
        ("a.json", b"[" * 100_000, "must hold a JSON list of objects, in UTF-8: maximum recursion depth"),
        ("a.csv", b"a,b\n1,2\n3\n", "near line 3: a row needs a field for each of the 2 columns"),
        ("a.csv", b"a,b\n1,2,3\n", "near line 2: a row needs a field for each of the 2 columns"),
        ("a.csv", b"a,a\n1,2\n", "two columns have the same name, of a, a"),
        ("a.csv", b'a\n"b', "near line 1: unexpected end of data"),
        ("a.csv", b"a\n\xff\n", "must be a CSV file in UTF-8 with names in its first line: near line 2: 'utf-8' codec"),
        ("a.csv", b"a\n" + b"12345\n" * 5000 + b"\xff\n" + b"1\n" * 9000, "near line 5002: 'utf-8' codec"),
        ("a.parquet", b"PAR1", "must be a Parquet file: "),
        ("a.txt", b"a", "must end in .jsonl, .json, .csv, .parquet: "),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_place(name, content, message, tmp_path):
    said = error(write(tmp_path / name, content))
    assert str(tmp_path / name) in said and message in said


def test_an_empty_file_has_no_rows(tmp_path):
    for name in ("a.jsonl", "a.json", "a.csv"):
        assert rows(write(tmp_path / name, "")) == []


def test_a_folder_with_a_file_for_each_split_gives_that_split(tmp_path):
    write(tmp_path / "train.jsonl", '{"input": "a"}')
    write(tmp_path / "test.csv", "input\nb\n")
    assert rows(tmp_path, "train") == [(0, {"input": "a"})]
    assert rows(tmp_path, "test") == [(0, {"input": "b"})]
    write(tmp_path / "test.json", "[]")
    assert "must have one file for a split: " in error(tmp_path, "test")


def test_a_saved_data_set_and_the_splits_of_saved_ones_are_read(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[1:])}).save_to_disk(tmp_path / "two")
    assert rows(tmp_path / "one") == list(enumerate(ROWS))
    assert rows(tmp_path / "two", "train", max_rows=1) == [(0, ROWS[0])]
    assert rows(tmp_path / "two", "test") == [(0, ROWS[1])]
    assert "split 'dev': ValueError: its splits are train, test." in error(tmp_path / "two", "dev")


def test_a_folder_as_the_hub_lays_it_out_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set" / "data").mkdir(parents=True)
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "set" / "data" / "train-00000-of-00001.parquet")
    assert rows(tmp_path / "set", "train") == list(enumerate(ROWS))
    assert "split 'test': " in error(tmp_path / "set", "test")


def test_what_keeps_a_folder_from_being_read_is_told(tmp_path, monkeypatch):
    """`datasets` itself says only that an error occurred."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "prompts.jsonl", '{"input": "a"}\n{"input": \n')
    assert "DatasetGenerationError: " in (said := error(tmp_path / "set")) and ": JSON parse error: " in said
    assert "\n" not in said and ".." not in said


def test_a_folder_without_data_is_an_error(tmp_path):
    (tmp_path / "notes.md").write_text("nothing")
    said = error(tmp_path)
    assert f"{tmp_path}, split 'train': " in said and "Check the name, --prompt_split and --eval_split." in said


def test_what_is_neither_here_nor_an_id_is_an_error():
    for name in ("nowhere.jsonl", "data/nowhere.jsonl", "/nowhere/data", "a/b/c", "nowhere", "./nowhere", "../nowhere"):
        assert error(name) == (
            f"Prompts must be a file, a folder or a hub id: {name} is no file and no folder. Check the path."
        )


def test_a_hub_id_that_the_hub_does_not_give_is_an_error_and_plain_files_start_without_datasets(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"input": "a"}')
    program = (
        "import sys; from lightrft.datasets.sources import read_source\n"
        f"read_source({path!r}, 'train'); assert not {{'datasets', 'pyarrow', 'pandas'}} & set(sys.modules)\n"
        "try: read_source('lightrft/no-such-set:main', 'train')\n"
        "except ValueError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert "lightrft/no-such-set:main, split 'train': " in ended.stdout
    assert "No folder here has this name. Check the name, --prompt_split and --eval_split." in ended.stdout
    assert ended.stderr == "" and ended.returncode == 0
