"""Profiles of a step on a GPU."""

import contextlib
import gzip
import json
import pickle

import pytest
import torch

from lightrft.config import ReportConfig
from lightrft.utils.profiling import StepProfiler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def profiler(folder, **options: str) -> StepProfiler:
    def collect(name: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    return StepProfiler(ReportConfig(**options), folder, 0, torch.device("cuda", 0), collect)


def test_a_trace_holds_the_kernels(tmp_path):
    with profiler(tmp_path, profile_steps="1").step(1):
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    events = json.loads(gzip.decompress((tmp_path / "trace_step1_rank0.json.gz").read_bytes()))["traceEvents"]
    assert [event for event in events if event.get("cat") == "kernel"]


def test_a_memory_snapshot_holds_the_chosen_step_s_allocations_and_no_later_ones(tmp_path):
    steps = profiler(tmp_path, memory_snapshot_steps="2")
    sizes = {1: 3 * 2**20, 2: 5 * 2**20, 3: 7 * 2**20}
    for step, size in sizes.items():
        with steps.step(step):
            torch.empty(size, dtype=torch.uint8, device="cuda")
    [path] = tmp_path.iterdir()
    assert path.name == "memory_step2_rank0.pickle"
    [events] = pickle.loads(path.read_bytes())["device_traces"]
    assert {event["size"] for event in events if event["action"] == "alloc"} == {sizes[2]}


def test_recording_ends_where_the_step_fails(tmp_path):
    steps = profiler(tmp_path, memory_snapshot_steps="1,2")
    with pytest.raises(KeyError), steps.step(1):
        raise KeyError
    torch.empty(9 * 2**20, dtype=torch.uint8, device="cuda")
    with steps.step(2):
        pass
    [events] = pickle.loads((tmp_path / "memory_step2_rank0.pickle").read_bytes())["device_traces"]
    assert events == []
