"""PhaseClock: which phase of a step is running, for the display and for `time/*`."""

import time

from lightrft.utils.progress import ProgressDisplay


class PhaseClock:
    """Calling it with a name ends the running phase and starts that one."""

    def __init__(self, progress: ProgressDisplay) -> None:
        self.progress = progress
        self._seconds: dict[str, float] = {}
        self._running: tuple[str, float] | None = None

    def __call__(self, name: str) -> None:
        self._end()
        self._running = (name, time.perf_counter())
        self.progress.phase(name)

    def collect(self) -> dict[str, float]:
        """Wall seconds of each phase since the last call; the running phase ends."""
        self._end()
        seconds = {f"time/{name}": value for name, value in self._seconds.items()}
        self._seconds = {}
        return seconds

    def _end(self) -> None:
        if self._running is not None:
            name, started = self._running
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started
            self._running = None
