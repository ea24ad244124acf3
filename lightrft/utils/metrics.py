"""The run folder: what one run writes for people and programs to read."""

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from io import FileIO
from itertools import count
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

from lightrft.utils.logging import get_logger
from lightrft.utils.plots import plot_rewards

logger = get_logger(__name__)

CONFIG, METRICS, SAMPLES, EVAL_SAMPLES, SUMMARY, REWARDS, TENSORBOARD = (
    "config.yaml",
    "metrics.jsonl",
    "samples.jsonl",
    "eval_samples.jsonl",
    "summary.json",
    "reward.png",
    "tensorboard",
)


class MetricsWriter(Protocol):
    """What the trainer writes to, on every rank."""

    def write_config(self, yaml_text: str) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def log_samples(self, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def log_eval_samples(self, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def write_summary(self, summary: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Writers:
    """Several writers as one. Without any it is the other ranks' writer: rank 0 alone writes."""

    def __init__(self, *writers: MetricsWriter) -> None:
        self._writers = writers

    def write_config(self, yaml_text: str) -> None:
        for writer in self._writers:
            writer.write_config(yaml_text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.log(step, metrics)

    def log_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for writer in self._writers:
            writer.log_samples(rows)

    def log_eval_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for writer in self._writers:
            writer.log_eval_samples(rows)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write_summary(summary)

    def close(self) -> None:
        """Closes each, even where another fails to."""
        with ExitStack() as stack:
            for writer in reversed(self._writers):
                stack.callback(writer.close)


class RunWriter:
    """Rank 0's writer. Files of an earlier run in the same folder are moved aside, never overwritten.

    A resumed run goes on in its own metrics and samples; their lines of later steps, which come again, move aside.

    Args:
        save_path: The run folder.
        other_outputs: further entries of the folder that this run will write, e.g. the final model; moved aside too.
        resumed_step: last step of the part of the run that is kept; None for a run that starts.
    """

    def __init__(
        self, save_path: str | Path, other_outputs: Sequence[str] = (), resumed_step: int | None = None
    ) -> None:
        # Imported here: it takes a second, and the other ranks and `--help` need none of it.
        from torch.utils.tensorboard import SummaryWriter

        self._folder = Path(save_path)
        self._folder.mkdir(parents=True, exist_ok=True)
        lasting = [METRICS, SAMPLES, EVAL_SAMPLES, TENSORBOARD]
        move_aside(self._folder, [CONFIG, SUMMARY, REWARDS, *other_outputs, *(lasting if resumed_step is None else [])])
        if resumed_step is not None:
            move_lines_aside(self._folder, [METRICS, SAMPLES, EVAL_SAMPLES], resumed_step)
        self._metrics = self._open(METRICS)
        self._samples = self._open(SAMPLES)
        purge_step = None if resumed_step is None else resumed_step + 1
        self._tensorboard = SummaryWriter(str(self._folder / TENSORBOARD), purge_step=purge_step, flush_secs=30)

    def write_config(self, yaml_text: str) -> None:
        (self._folder / CONFIG).write_text(yaml_text, encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line to metrics.jsonl and the same numbers to TensorBoard; NaN and infinity become null."""
        values = {name: float(value) for name, value in metrics.items()}
        _write_line(self._metrics, {"step": step, **values})
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)

    def log_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            _write_line(self._samples, row)

    def log_eval_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._open(EVAL_SAMPLES) as file:
            for row in rows:
                _write_line(file, row)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary, and draws the rewards of all steps."""
        write_json(self._folder / SUMMARY, summary)
        plot_rewards(self._folder / METRICS, self._folder / REWARDS)

    def close(self) -> None:
        """Closes each, even where another fails to."""
        with ExitStack() as stack:
            for file in (self._tensorboard, self._samples, self._metrics):
                stack.callback(file.close)

    def _open(self, name: str) -> FileIO:
        return (self._folder / name).open("ab", buffering=0)


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


def move_lines_aside(folder: Path, names: Sequence[str], last_step: int) -> None:
    """Moves the lines of steps after `last_step` to `<name>.<k>`, and all from one on that a crash has spoiled."""
    for name in names:
        path = folder / name
        if not path.exists():
            continue
        start = _end_of_step(path, last_step)
        size = path.stat().st_size
        if start == size:
            continue
        k = next(k for k in count(1) if not (folder / f"{name}.{k}").exists())
        with path.open("r+b") as source, (folder / f"{name}.{k}").open("xb") as target:
            source.seek(start)
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())
            source.truncate(start)
        logger.info("%s: what came after step %d is moved to %s.%d", path, last_step, name, k)


def _end_of_step(path: Path, last_step: int) -> int:
    """Where the first line of a later step, or one that is spoiled, begins; lines are in the order of their steps."""
    position = 0
    with path.open("rb") as file:
        for line in file:
            step = _step_of(line)
            if step is None or step > last_step:
                break
            position += len(line)
    return position


def _step_of(line: bytes) -> int | None:
    """The step of a line, or None where a kill has cut it or a machine that went down has left zeros in its place."""
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)["step"]
    except ValueError:
        return None


def read_summary(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The summary of a run that has ended, which holds these figures.

    Raises:
        ValueError: there is no summary, or one without them.
    """
    path = folder / SUMMARY
    if not path.is_file():
        raise ValueError(f"A finished run has a {SUMMARY}: {folder} has none. Look at the errors of the training.")
    summary = json.loads(path.read_text(encoding="utf-8"))
    if missing := [name for name in names if name not in summary]:
        raise ValueError(
            f"The summary must hold {', '.join(missing)}: {path} holds {', '.join(summary)}. "
            "Let the run come to its end, with --eval_data and a reward that gives them."
        )
    return summary


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
        # Those of numpy too, which rows of tables may hold.
        case Integral():
            return int(value)
        case Real():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(key): jsonable(item) for key, item in value.items()}
        case list() | tuple():
            return [jsonable(item) for item in value]
        case _:
            return str(value)


def _write_line(file: FileIO, row: Mapping[str, Any]) -> None:
    """Nothing is buffered: a run can be followed, a kill loses nothing, and a full disk is told once, with the file."""
    # A lone surrogate in a user's data cannot be encoded; its escape is the same string in JSON.
    rest = (json.dumps(jsonable(row), ensure_ascii=False) + "\n").encode(errors="backslashreplace")
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        error.filename = str(file.name)
        raise
