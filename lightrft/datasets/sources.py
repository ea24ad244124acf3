"""Sources of rows: files by their ending, folders, and data sets of the Hugging Face hub."""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

Row: TypeAlias = tuple[int, Any]
"""Index in the source, and the value: a mapping of columns, unless the source is wrong."""
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", re.ASCII)
"""`owner/name`, or `owner/name:config` where a data set has several; `./name` is none."""


@dataclass(frozen=True)
class Source:
    """Rows of one place, with values as they stand there."""

    name: str
    rows: Sequence[Row]
    has_lines: bool = False
    """Each row is a line, so that line i + 1 holds row i."""
    folder: Path | None = None
    """Where relative paths in its rows begin; None: where the process runs."""

    def where(self, row: int) -> str:
        """The place of a row, for messages."""
        return f"{self.name}, row {row} (line {row + 1})" if self.has_lines else f"{self.name}, row {row}"


def read_source(name: str, split: str, max_rows: int | None = None) -> Source:
    """The first `max_rows` rows.

    Args:
        name: A file, a folder with a file for each split (`train.jsonl`), a folder that `datasets` knows, or the id
            of a data set on the Hugging Face hub, with `:config` behind it where it has several.
        split: Which part of a folder or of a data set on the hub; a file is all of it.
        max_rows: Rows to read; None reads all.

    Raises:
        ValueError: there is no such source or split, or it cannot be read.
    """
    path = Path(name)
    if path.is_file():
        return _read_file(path, name, max_rows)
    if path.is_dir():
        return _read_folder(path, name, split, max_rows)
    if HUB_ID.fullmatch(name) and path.suffix.lower() not in READERS:
        return _read_dataset(name, split, max_rows)
    raise ValueError(f"Prompts must be a file, a folder or a hub id: {name} is no file and no folder. Check the path.")


def _read_file(path: Path, name: str, max_rows: int | None) -> Source:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"A file of prompts must end in {', '.join(READERS)}: {name} does not. Rename or convert it.")
    if reader is _json_list and not _starts_a_list(path):
        reader = _json_lines
    return Source(name, list(islice(reader(path), max_rows)), reader is _json_lines, path.parent)


def _read_folder(path: Path, name: str, split: str, max_rows: int | None) -> Source:
    files = [file for ending in READERS if (file := path / f"{split}{ending}").is_file()]
    if len(files) > 1:
        raise ValueError(
            f"A folder of prompts must have one file for a split: {name} has {', '.join(file.name for file in files)}. "
            "Name the file."
        )
    return _read_file(files[0], str(files[0]), max_rows) if files else _read_dataset(name, split, max_rows)


def _read_dataset(name: str, split: str, max_rows: int | None) -> Source:
    """Rows of a data set that the `datasets` library knows how to find."""
    # Half a second that plain files do not need.
    from datasets.exceptions import DatasetsError

    try:
        rows = _find_dataset(name, split)
    except (ValueError, OSError, DatasetsError) as error:
        here = "" if Path(name).is_dir() else "No folder here has this name. "
        raise ValueError(
            f"Prompts must be a file, a folder or a hub id with the split that is asked for: {name}, split {split!r}: "
            f"{_reason(error)}. {here}Check the name, --prompt_split and --eval_split."
        ) from error
    if max_rows is not None:
        rows = rows.select(range(min(max_rows, len(rows))))
    return Source(name, list(enumerate(rows.to_list())), folder=Path(name) if Path(name).is_dir() else None)


def _reason(error: BaseException) -> str:
    """The first line of an error of `datasets`, and of what lies behind it where it says only that something failed."""
    from datasets.exceptions import DatasetGenerationError

    line = str(error).partition("\n")[0]
    text = f"{type(error).__name__}: {line.rstrip('.')}"
    if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        return f"{text}: {_reason(error.__cause__)}"
    return text


def _find_dataset(name: str, split: str) -> Any:
    from datasets import Dataset, disable_progress_bars, load_dataset, load_from_disk

    disable_progress_bars()  # Every rank would draw its own.
    path = Path(name)
    if not any((path / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        # A folder's own name may hold a colon.
        repository, config = (name, None) if path.is_dir() else name.partition(":")[::2]
        return load_dataset(repository, config or None, split=split)
    saved = load_from_disk(name)
    if isinstance(saved, Dataset):
        return saved
    if split not in saved:
        raise ValueError(f"its splits are {', '.join(map(str, saved))}")
    return saved[split]


def _json_lines(path: Path) -> Iterator[Row]:
    """Rows of the lines that are not blank."""
    # Bytes: lines end at \n alone, and errors can name theirs.
    with path.open("rb") as file:
        for row, line in enumerate(file):
            if not line.strip():
                continue
            try:
                value = json.loads(line.rstrip().decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                # The line that the parser counts is always its first.
                what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                raise ValueError(
                    f"{path} must hold one JSON object a line, in UTF-8: line {row + 1}: {what}. Correct the line."
                ) from error
            yield row, value


def _starts_a_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _json_list(path: Path) -> Iterator[Row]:
    try:
        values = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must hold a JSON list of objects, in UTF-8: {error}. Correct the file.") from error
    yield from enumerate(values)


def _csv(path: Path) -> Iterator[Row]:
    """Rows by the names in the first line; every value is text, as it is written."""
    # The default refuses fields of more than 128 KiB, and prompts may be longer.
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            columns = reader.fieldnames or []
            if len(set(columns)) < len(columns):
                raise ValueError(f"two columns have the same name, of {', '.join(columns)}")
            for row, value in enumerate(reader):
                if None in value or None in value.values():
                    raise ValueError(f"a row needs a field for each of the {len(columns)} columns")
                yield row, value
        except (ValueError, csv.Error) as error:
            line = _line_at(reader, error)
            raise ValueError(
                f"{path} must be a CSV file in UTF-8 with names in its first line: near line {line}: {error}. "
                "Correct the file."
            ) from error


def _line_at(reader: "csv.DictReader[str]", error: Exception) -> int:
    """The line that was read last; bytes that are no UTF-8 stand further on, in the block that comes after it."""
    if isinstance(error, UnicodeDecodeError):
        return reader.line_num + 1 + error.object.count(b"\n", 0, error.start)
    return reader.line_num


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield from enumerate(row for batch in file.iter_batches() for row in batch.to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} must be a Parquet file: {str(error).rstrip('.')}. Write the file again.") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json_list,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""How a file of each ending is read."""
