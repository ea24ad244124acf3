"""The run folder: what one run writes for people and programs to read."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from lightrft.utils.logging import get_logger

logger = get_logger(__name__)

CONFIG, METRICS, SAMPLES, SUMMARY, TENSORBOARD = (
    "config.yaml",
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
    "tensorboard",
)


class MetricsWriter(Protocol):
    """What the trainer writes to, on every rank."""

    def write_config(self, yaml_text: str) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def log_samples(self, rows: Iterable[Mapping[str, Any]]) -> None: ...
    def write_summary(self, summary: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class NullWriter:
    """The other ranks' writer: rank 0 alone writes."""

    def write_config(self, yaml_text: str) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def log_samples(self, rows: Iterable[Mapping[str, Any]]) -> None: ...
    def write_summary(self, summary: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class RunWriter:
    """Rank 0's writer. Files of an earlier run in the same folder are moved aside, never overwritten.

    Args:
        other_outputs: further entries of the folder that this run will write, e.g. the final model; moved aside too.
    """

    def __init__(self, save_path: str | Path, other_outputs: Sequence[str] = ()) -> None:
        # Imported here: it takes a second, and the other ranks and `--help` need none of it.
        from torch.utils.tensorboard import SummaryWriter

        self._folder = Path(save_path)
        self._folder.mkdir(parents=True, exist_ok=True)
        move_aside(self._folder, [CONFIG, METRICS, SAMPLES, SUMMARY, TENSORBOARD, *other_outputs])
        self._metrics = self._open(METRICS)
        self._samples = self._open(SAMPLES)
        self._tensorboard = SummaryWriter(str(self._folder / TENSORBOARD), flush_secs=30)

    def write_config(self, yaml_text: str) -> None:
        (self._folder / CONFIG).write_text(yaml_text, encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line to metrics.jsonl and the same numbers to TensorBoard; NaN and infinity become null."""
        values = {name: float(value) for name, value in metrics.items()}
        _write_line(self._metrics, {"step": step, **values})
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)

    def log_samples(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            _write_line(self._samples, row)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self._folder / SUMMARY, summary)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        self._tensorboard.close()

    def _open(self, name: str) -> IO[str]:
        # A lone surrogate in a user's data cannot be encoded; its escape is the same string in JSON.
        return (self._folder / name).open("x", encoding="utf-8", errors="backslashreplace")


def move_aside(folder: Path, names: Sequence[str]) -> None:
    """Renames the entries that exist to `<name>.<k>`, with the smallest k that none of the names has used."""
    existing = [name for name in names if (folder / name).exists()]
    if not existing:
        return
    k = 1
    while any((folder / f"{name}.{k}").exists() for name in names):
        k += 1
    for name in existing:
        (folder / name).rename(folder / f"{name}.{k}")
    logger.info("%s holds an earlier run: moved aside with the ending .%d: %s", folder, k, ", ".join(existing))


def write_json(path: Path, value: Any) -> None:
    """Writes the file whole or not at all: a reader or a kill never meets half of it."""
    temporary = path.with_name(f"{path.name}.writing")
    temporary.write_text(json.dumps(jsonable(value), indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def jsonable(value: Any) -> Any:
    """The value in JSON's types: numbers that are not finite become None, unknown objects their `str`."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): jsonable(item) for key, item in value.items()}
        case list() | tuple():
            return [jsonable(item) for item in value]
        case _:
            return str(value)


def _write_line(file: IO[str], row: Mapping[str, Any]) -> None:
    """Flushed at once, so that a run can be followed and a kill loses nothing."""
    file.write(json.dumps(jsonable(row), ensure_ascii=False) + "\n")
    file.flush()
