"""What an offline run of Weights & Biases holds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK_SIZE, HEADER_SIZE, FILE_HEADER_SIZE = 32768, 7, 7
FULL, LAST = 1, 4


def history(folder: Path) -> list[dict[str, Any]]:
    """The logged metrics of the only run in a run folder, step by step, without Weights & Biases' own."""
    rows = [record.history for record in records(folder) if record.WhichOneof("record_type") == "history"]
    return [
        {"step": row.step.num} | {name: value for name, value in _values(row.item).items() if not name.startswith("_")}
        for row in rows
    ]


def config(folder: Path) -> dict[str, Any]:
    """Its configuration: updates of the run's own and later ones."""
    found: dict[str, Any] = {}
    for record in records(folder):
        found |= _values(record.run.config.update) | _values(record.config.update)
    return found


def exit_code(folder: Path) -> int:
    return next(r.exit.exit_code for r in records(folder) if r.WhichOneof("record_type") == "exit")


def run_ids(folder: Path) -> list[str]:
    """Of all runs in a run folder, by time."""
    return [path.stem.removeprefix("run-") for path in files(folder)]


def files(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/*.wandb"))


def records(folder: Path) -> Iterator[Record]:
    [path] = files(folder)
    for data in chunks(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        yield record


def chunks(data: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format: blocks of parts, each with checksum, length and kind."""
    position, whole = FILE_HEADER_SIZE, b""
    while position + HEADER_SIZE <= len(data):
        if BLOCK_SIZE - position % BLOCK_SIZE < HEADER_SIZE:
            position += BLOCK_SIZE - position % BLOCK_SIZE
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        whole += data[position + HEADER_SIZE : position + HEADER_SIZE + length]
        position += HEADER_SIZE + length
        if kind in (FULL, LAST):
            yield whole
            whole = b""


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
