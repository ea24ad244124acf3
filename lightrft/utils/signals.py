"""Stop signals: SIGINT and SIGTERM ask a run to end after its step; a second one ends the process at once."""

import os
import signal
import threading
import time
from multiprocessing.connection import wait
from types import TracebackType
from typing import Self

from lightrft.utils.logging import get_logger

logger = get_logger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SECONDS = 1.0
"""Signals that come closer together are one: a terminal and torchrun may both deliver it."""
_POLL_SECONDS = 0.2
_STDERR = 2


class StopSignals:
    """Context in which a first signal is noted, and a second one ends the process with code 128 + its number.

    A thread sees the signals, since the main thread may hang in a collective, where Python runs no handler. Under
    torchrun a second signal reaches only torchrun, which then leaves: the ranks end with it.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the first signal, or 0."""

    def __enter__(self) -> Self:
        self._active = threading.current_thread() is threading.main_thread()
        if not self._active:
            return self
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._old_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._active:
            return
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.write(self._write_end, b"\0")
        self._thread.join()
        os.close(self._read_end)
        os.close(self._write_end)

    def _note(self, number: int, frame: object) -> None:
        self.received = self.received or number

    def _watch(self) -> None:
        first = 0.0
        agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        while True:
            ready = wait([self._read_end], _POLL_SECONDS if first else None)
            numbers = os.read(self._read_end, 64) if ready else b""
            for number in (n for n in numbers if n in SIGNALS):
                if not first:
                    first = time.monotonic()
                    self._note(number, None)
                    logger.warning("%s: the run ends after this step; a second signal ends it now", _name(number))
                elif time.monotonic() - first > SAME_SECONDS:
                    _end(f"a second {_name(number)}", number)
            # Behind the signals: one may have come right before the context was left.
            if 0 in numbers:
                return
            if first and agent is not None and os.getppid() != agent:
                _end("torchrun has gone", self.received)


def _name(number: int) -> str:
    return signal.Signals(number).name


def _end(reason: str, number: int) -> None:
    os.write(_STDERR, f"ERROR: {reason} ends this process now.\n".encode())
    os._exit(128 + number)
