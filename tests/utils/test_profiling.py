"""Traces and memory snapshots of chosen steps, on the CPU."""

import contextlib
import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from lightrft.config import ReportConfig
from lightrft.utils.profiling import StepProfiler, check_memory_snapshots


class Phases:
    """Notes the phases in which a rank may fail."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str) -> contextlib.AbstractContextManager[None]:
        self.names.append(name)
        return contextlib.nullcontext()


def profiler(folder: Path, collect: Phases, **options: str) -> StepProfiler:
    return StepProfiler(ReportConfig(**options), folder, 1, torch.device("cpu"), collect)


def test_a_chosen_step_leaves_a_chrome_trace_with_its_operations(tmp_path):
    phases = Phases()
    steps = profiler(tmp_path / "profile", phases, profile_steps="2,4")
    for step in (1, 2, 3):
        with steps.step(step):
            torch.ones(step, 5).cumsum(-1)
    [path] = (tmp_path / "profile").iterdir()
    assert path.name == "trace_step2_rank1.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    [shape] = [event["args"]["Input Dims"][0] for event in events if event["name"] == "aten::cumsum"]
    assert shape == [2, 5]
    assert phases.names == ["writing a trace"]


def test_a_step_that_fails_raises_its_own_error_and_leaves_no_trace(tmp_path):
    steps = profiler(tmp_path / "profile", Phases(), profile_steps="1")
    with pytest.raises(KeyError), steps.step(1):
        raise KeyError("mine")
    assert not (tmp_path / "profile").exists()
    with steps.step(1):
        pass
    assert (tmp_path / "profile").exists()


def test_steps_outside_the_run_are_named(tmp_path, caplog):
    steps = profiler(tmp_path, Phases(), profile_steps="3,9", memory_snapshot_steps="12")
    with caplog.at_level(logging.WARNING, logger="lightrft"):
        steps.warn_of_missed_steps(4, 9)
    assert "which has 4 to 9: 3, 12" in caplog.text
    caplog.clear()
    steps.warn_of_missed_steps(3, 12)
    assert caplog.text == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record")
def test_memory_snapshots_without_a_gpu_are_refused():
    with pytest.raises(ValueError, match=r"memory_snapshot_steps=3.*Drop --memory_snapshot_steps"):
        check_memory_snapshots(ReportConfig(memory_snapshot_steps="3"))
    check_memory_snapshots(ReportConfig())
