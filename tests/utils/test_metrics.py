"""The run folder."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightrft.utils.logging import get_logger, setup_logging
from lightrft.utils.metrics import MetricsWriter, RunWriter, Writers, jsonable, move_aside, read_summary, write_json


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_metrics_are_one_object_a_line_with_the_step_first(tmp_path):
    writer = RunWriter(tmp_path)
    writer.log(1, {"reward/mean": 0.25})
    writer.log(2, {"reward/mean": 0.5, "train/entropy": 1.5})
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.25},
        {"step": 2, "reward/mean": 0.5, "train/entropy": 1.5},
    ]
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"step": 1, ')
    writer.close()


def test_metrics_can_be_read_while_the_run_is_alive_and_after_a_kill(tmp_path):
    writer = RunWriter(tmp_path)
    writer.log(1, {"a": 1.0})
    writer.log_samples([{"response": "132"}])
    assert len(read_lines(tmp_path / "metrics.jsonl")) == len(read_lines(tmp_path / "samples.jsonl")) == 1
    writer.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_become_null(tmp_path, value):
    writer = RunWriter(tmp_path)
    writer.log(1, {"reward/mean": value})
    writer.log_samples([{"reward": value, "parts": [value, {"deep": value}]}])
    writer.write_summary({"accuracy": value})
    writer.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": None}]
    assert read_lines(tmp_path / "samples.jsonl") == [{"reward": None, "parts": [None, {"deep": None}]}]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"accuracy": None}


def test_tensorboard_holds_the_same_numbers(tmp_path):
    writer = RunWriter(tmp_path)
    writer.log(3, {"reward/mean": 0.25, "eval/pass@4": 0.5})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(3, 0.25)]
    assert [event.value for event in events.Scalars("eval/pass@4")] == [0.5]


def test_samples_keep_every_script_and_survive_a_lone_surrogate(tmp_path):
    writer = RunWriter(tmp_path)
    writer.log_samples([{"response": "三十二"}, {"response": "\ud800"}])
    writer.close()
    text = (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    assert "三十二" in text
    assert [row["response"] for row in read_lines(tmp_path / "samples.jsonl")] == ["三十二", "\ud800"]


def test_numbers_of_numpy_are_numbers():
    numbers = jsonable([np.int64(3), np.float32(0.5), np.float64("nan"), np.float32("inf"), True])
    assert json.dumps(numbers) == "[3, 0.5, null, null, true]"


def test_values_of_unknown_types_are_written_as_text():
    assert jsonable({1: (Path("a"), True, None)}) == {"1": ["a", True, None]}


def test_an_earlier_run_is_moved_aside_whole(tmp_path):
    """Two earlier runs: the first keeps the ending .1, the second gets .2, whichever files each has."""
    for number in (1, 2, 3):
        writer = RunWriter(tmp_path, ["model"])
        writer.log(number, {"a": float(number)})
        writer.write_config(f"run: {number}\n")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "weights").write_text(str(number))
        if number == 2:
            writer.write_summary({"run": number})
        writer.close()
    for number, ending in ((1, ".1"), (2, ".2"), (3, "")):
        assert read_lines(tmp_path / f"metrics.jsonl{ending}")[0]["step"] == number
        assert (tmp_path / f"config.yaml{ending}").read_text() == f"run: {number}\n"
        assert (tmp_path / f"model{ending}" / "weights").read_text() == str(number)
        assert (tmp_path / f"tensorboard{ending}").is_dir()
    assert sorted(path.name for path in tmp_path.glob("summary*")) == ["summary.json.2"]


def test_moving_aside_says_so_and_leaves_other_files_alone(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "notes.txt").touch()
    with caplog.at_level(logging.INFO, logger="lightrft"):
        move_aside(tmp_path, ["metrics.jsonl", "summary.json"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl.1", "notes.txt"]
    assert "moved aside with the ending .1: metrics.jsonl" in caplog.text


def test_a_summary_is_read_back_where_it_holds_what_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match=rf"has a summary\.json: {tmp_path} has none"):
        read_summary(tmp_path, [])
    write_json(tmp_path / "summary.json", {"steps": 3, "accuracy_before": 0.5})
    assert read_summary(tmp_path, ["accuracy_before"]) == {"steps": 3, "accuracy_before": 0.5}
    with pytest.raises(ValueError, match=r"must hold b, c: .*summary\.json holds steps, accuracy_before\. Let"):
        read_summary(tmp_path, ["b", "steps", "c"])


def test_a_summary_that_cannot_be_written_leaves_the_old_one(tmp_path):
    write_json(tmp_path / "summary.json", {"accuracy": 0.5})
    (tmp_path / "summary.json.writing").mkdir()
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path / "summary.json", {"accuracy": 0.9})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"accuracy": 0.5}


class Notes:
    """A writer that notes what it is told."""

    def __init__(self, events: list[str], closes: bool = True) -> None:
        self.events = events
        self.closes = closes

    def write_config(self, yaml_text: str) -> None:
        self.events.append(yaml_text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(f"step {step}")

    def log_samples(self, rows: Sequence[Mapping]) -> None:
        self.events.append(f"{len(rows)} samples")

    def log_eval_samples(self, rows: Sequence[Mapping]) -> None:
        self.events.append(f"{len(rows)} eval samples")

    def write_summary(self, summary: Mapping) -> None:
        self.events.append("summary")

    def close(self) -> None:
        self.events.append("close")
        if not self.closes:
            raise OSError("no space left")


def tell_all(writer: MetricsWriter) -> None:
    writer.write_config("a: 1")
    writer.log(1, {"a": 1.0})
    writer.log_samples([{}])
    writer.log_eval_samples([{}, {}])
    writer.write_summary({"a": 1})
    writer.close()


def test_several_writers_are_told_all_as_one():
    first: list[str] = []
    second: list[str] = []
    tell_all(Writers(Notes(first), Notes(second)))
    assert first == second == ["a: 1", "step 1", "1 samples", "2 eval samples", "summary", "close"]


def test_a_writer_that_cannot_be_closed_leaves_no_other_open():
    events: list[str] = []
    with pytest.raises(OSError, match="no space left"):
        Writers(Notes(events, closes=False), Notes(events)).close()
    assert events == ["close", "close"]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    """CLI-03: one run folder, from rank 0 only."""
    monkeypatch.chdir(tmp_path)
    tell_all(Writers())
    assert list(tmp_path.iterdir()) == []


def test_evaluation_samples_have_a_file_of_their_own_where_there_are_any(tmp_path):
    writer = RunWriter(tmp_path)
    writer.log_samples([{"step": 1}])
    assert not (tmp_path / "eval_samples.jsonl").exists()
    for step in (0, 2):
        writer.log_eval_samples([{"step": step}])
    writer.close()
    assert read_lines(tmp_path / "samples.jsonl") == [{"step": 1}]
    assert read_lines(tmp_path / "eval_samples.jsonl") == [{"step": 0}, {"step": 2}]


def test_a_resumed_run_goes_on_in_its_evaluation_samples(tmp_path):
    for resumed_step, steps in ((None, (0, 2, 4)), (2, (4, 6))):
        writer = RunWriter(tmp_path, resumed_step=resumed_step)
        for step in steps:
            writer.log_eval_samples([{"step": step}])
        writer.close()
    assert [row["step"] for row in read_lines(tmp_path / "eval_samples.jsonl")] == [0, 2, 4, 6]


def test_the_summary_comes_with_the_reward_curve(tmp_path):
    writer = RunWriter(tmp_path)
    writer.log(1, {"reward/mean": 0.25})
    writer.write_summary({})
    writer.close()
    assert (tmp_path / "reward.png").stat().st_size > 1000


@pytest.fixture
def lightrft_logger():
    logger = logging.getLogger("lightrft")
    before = logger.handlers, logger.level, logger.propagate
    yield logger
    logger.handlers, logger.level, logger.propagate = before


def test_rank_0_logs_information_and_the_others_only_warnings_with_their_rank(lightrft_logger, capsys):
    """CLI-03."""
    logger = get_logger("lightrft.trainer")
    for rank in (0, 1):
        setup_logging(rank)
        logger.info("information")
        logger.warning("warning of %d", rank)
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["INFO information", "WARNING warning of 0", "WARNING [rank 1] warning of 1"]


def test_a_script_s_logger_is_governed_too(lightrft_logger, capsys):
    setup_logging(0)
    get_logger("examples.addition").info("ready")
    assert capsys.readouterr().err.endswith("INFO ready\n")


def test_a_resumed_run_goes_on_in_its_files_and_nothing_is_lost(tmp_path):
    """CKPT-05: lines after the checkpoint's step, and one that a kill has cut, move aside."""
    writer = RunWriter(tmp_path, ["model"])
    for step in (0, 1, 2, 3):
        writer.log(step, {"reward/mean": float(step)})
        writer.log_samples([{"step": step, "response": "三"}] * 2)
    writer.write_config("run: 1\n")
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    resumed = RunWriter(tmp_path, ["model"], resumed_step=2)
    resumed.log(3, {"reward/mean": 30.0})
    resumed.log_samples([{"step": 3, "response": "new"}])
    resumed.close()
    assert [(line["step"], line["reward/mean"]) for line in read_lines(tmp_path / "metrics.jsonl")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    assert (tmp_path / "metrics.jsonl.1").read_text() == '{"step": 3, "reward/mean": 3.0}\n{"step": 4, "rew'
    assert [line["step"] for line in read_lines(tmp_path / "samples.jsonl")] == [0, 0, 1, 1, 2, 2, 3]
    assert [line["step"] for line in read_lines(tmp_path / "samples.jsonl.1")] == [3, 3]
    assert (tmp_path / "config.yaml.1").read_text() == "run: 1\n"
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]


def test_a_resumed_run_goes_on_before_a_line_that_cannot_be_read(tmp_path):
    """CKPT-05: some file systems leave zeros where a machine went down before the bytes of a line were written."""
    spoiled = b'\0\0\0\0\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + spoiled)
    RunWriter(tmp_path, resumed_step=2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'
    assert (tmp_path / "metrics.jsonl.1").read_bytes() == spoiled


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_once_and_with_the_file(tmp_path):
    writer = RunWriter(tmp_path)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._metrics.fileno())
    os.close(full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/metrics\.jsonl'"):
        writer.log(1, {"a": 1.0})
    writer.close()


def test_a_run_that_is_resumed_in_another_folder_starts_its_files_there(tmp_path):
    RunWriter(tmp_path, resumed_step=2).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
