"""StepProfiler: what chosen steps spend time and device memory on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lightrft.config.arguments import ReportConfig
from lightrft.config.steps import chosen_steps
from lightrft.utils.logging import get_logger

logger = get_logger(__name__)

PROFILE = "profile"
"""Folder of the run folder."""
MAX_MEMORY_EVENTS = 1_000_000
"""Allocations and frees that a snapshot goes back; each takes about a kilobyte on the host while it is recorded."""


class StepProfiler:
    """Writes a trace and a memory snapshot of each chosen step, on every rank.

    Args:
        options: Says which steps.
        folder: Where the files go.
        rank: Goes into the files' names.
        device: Where the step runs.
        collect: Context in which one rank may fail; it makes all raise.
    """

    def __init__(
        self,
        options: ReportConfig,
        folder: Path,
        rank: int,
        device: torch.device,
        collect: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.traced_steps = chosen_steps(options.profile_steps)
        self.recorded_steps = chosen_steps(options.memory_snapshot_steps)
        self.folder = folder
        self.rank = rank
        self.device = device
        self.collect = collect

    def warn_of_missed_steps(self, first: int, last: int) -> None:
        """Says which chosen steps are none of the run's `first` to `last`."""
        missed = sorted(step for step in self.traced_steps | self.recorded_steps if not first <= step <= last)
        if missed:
            text = ", ".join(map(str, missed))
            logger.warning("steps to profile that are not in this run, which has %d to %d: %s", first, last, text)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The body is the step. Every rank must call it; a body that raises leaves no files."""
        with ExitStack() as stack:
            if step in self.recorded_steps:
                stack.enter_context(self._recorded(step))
            if step in self.traced_steps:
                stack.enter_context(self._traced(step))
            yield

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, record_shapes=True) as profiler:
            yield
        with self.collect("writing a trace"):
            profiler.export_chrome_trace(str(self._file("trace", step, "json.gz")))

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        try:
            yield
            with self.collect("writing a memory snapshot"):
                torch.cuda.memory._dump_snapshot(str(self._file("memory", step, "pickle")))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _file(self, kind: str, step: int, ending: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{kind}_step{step}_rank{self.rank}.{ending}"


def check_memory_snapshots(options: ReportConfig) -> None:
    """Raises ValueError where there is no device memory to record."""
    if options.memory_snapshot_steps is not None and not torch.cuda.is_available():
        raise ValueError(
            f"memory_snapshot_steps records the memory of GPUs: memory_snapshot_steps={options.memory_snapshot_steps}, "
            "and torch sees no GPU. Drop --memory_snapshot_steps."
        )
