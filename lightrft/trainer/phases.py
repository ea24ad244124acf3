"""PhaseClock: which phase of a step is running, for the display, for `time/*` and for the memory ledger."""

import time

from lightrft.utils.memory_ledger import MemoryLedger, PhaseMemory
from lightrft.utils.progress import ProgressDisplay


class PhaseClock:
    """Calling it with a name ends the running phase and starts that one."""

    def __init__(self, progress: ProgressDisplay, ledger: MemoryLedger) -> None:
        self.progress = progress
        self.ledger = ledger

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self.ledger.end(now)
        self.ledger.begin(name, now)
        self.progress.phase(name)

    def observe(self, event: str) -> None:
        """Has the ledger look at what the running phase holds, once an event."""
        self.ledger.observe(event)

    def collect(self) -> list[PhaseMemory]:
        """Each phase since the last call; the running phase ends."""
        self.ledger.end(time.perf_counter())
        return self.ledger.collect()


def phase_seconds(records: list[PhaseMemory]) -> dict[str, float]:
    """Wall seconds of each phase, as metrics."""
    return {f"time/{record.phase}": record.seconds for record in records}
