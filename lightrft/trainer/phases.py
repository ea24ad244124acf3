"""PhaseClock: which phase of a step is running, for the display, `time/*`, the memory ledger and a profile."""

import time

from torch.profiler import record_function

from lightrft.utils.memory_ledger import MemoryLedger, PhaseMemory
from lightrft.utils.progress import ProgressDisplay


class PhaseClock:
    """Calling it with a name ends the running phase and starts that one."""

    def __init__(self, progress: ProgressDisplay, ledger: MemoryLedger) -> None:
        self.progress = progress
        self.ledger = ledger
        self._traced: record_function | None = None

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self._end(now)
        self.ledger.begin(name, now)
        self._traced = record_function(f"phase/{name}")
        self._traced.__enter__()
        self.progress.phase(name)

    def observe(self, event: str) -> None:
        """Has the ledger look at what the running phase holds, once an event."""
        self.ledger.observe(event)

    def collect(self) -> list[PhaseMemory]:
        """Each phase since the last call; the running phase ends."""
        self._end(time.perf_counter())
        return self.ledger.collect()

    def _end(self, now: float) -> None:
        self.ledger.end(now)
        if self._traced is not None:
            self._traced.__exit__(None, None, None)
            self._traced = None


def phase_seconds(records: list[PhaseMemory]) -> dict[str, float]:
    """Wall seconds of each phase, as metrics."""
    return {f"time/{record.phase}": record.seconds for record in records}
