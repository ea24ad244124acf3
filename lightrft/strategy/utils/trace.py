"""The collective trace: which blocking section this process is in, for the watch to publish."""

import contextlib
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

_UTILS = str(Path(__file__).parent)
_STRATEGY = str(Path(__file__).parent.parent)
_CONTEXTLIB = str(contextlib.__file__)


class Site(NamedTuple):
    """A blocking section: its name and the lines that asked for it, innermost first."""

    name: str
    callers: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        lines = [f"{'/'.join(Path(filename).parts[-2:])}:{line}" for filename, line in self.callers]
        return " from ".join([f"{self.name} at {lines[0]}", *lines[1:]]) if lines else self.name


class TraceState(NamedTuple):
    """Where the process is."""

    site: Site | None
    """The innermost open site, or the last one that was left."""
    sequence: int
    """How many sites have been entered so far."""
    inside: bool
    since: float
    """`time.monotonic()` when this state began."""


class CollectiveTrace:
    """The current state of one process, written by its main thread and read by its watch.

    Ranks run the same program, so the n-th site of one rank is the n-th site of all: sequence numbers compare.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Site] = []
        self._state = TraceState(site=None, sequence=0, inside=False, since=time.monotonic())

    @property
    def state(self) -> TraceState:
        return self._state

    def site(self, name: str) -> "OpenSite":
        """A context in which this process counts as waiting. Costs microseconds and touches no device."""
        return OpenSite(self, name)

    def enter(self, site: Site) -> int:
        with self._lock:
            self._open.append(site)
            sequence = self._state.sequence + 1
            self._state = TraceState(site, sequence, inside=True, since=time.monotonic())
            return sequence

    def leave(self, site: Site) -> None:
        with self._lock:
            self._open.remove(site)
            current = self._open[-1] if self._open else site
            self._state = TraceState(current, self._state.sequence, inside=bool(self._open), since=time.monotonic())


class OpenSite:
    """Context of one site. A class, since `contextlib` would stand between it and the caller's frame."""

    def __init__(self, trace: CollectiveTrace, name: str) -> None:
        self._trace = trace
        self._site = Site(name, _callers())
        self._sequence = 0

    def __enter__(self) -> None:
        self._sequence = self._trace.enter(self._site)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._trace.leave(self._site)
        if error is not None:
            error.add_note(f"Raised in {self._site} (#{self._sequence}).")


def _callers() -> tuple[tuple[str, int], ...]:
    """The first line outside `strategy/utils` and, where that is in the strategy, the first one outside of it too."""
    inner = _skip(sys._getframe(1), _UTILS)
    outer = _skip(inner, _STRATEGY)
    frames = [inner] if inner is outer else [inner, outer]
    return tuple((frame.f_code.co_filename, frame.f_lineno) for frame in frames if frame is not None)


def _skip(frame: FrameType | None, folder: str) -> FrameType | None:
    """The nearest frame, outwards from `frame`, whose code is neither in `folder` nor in `contextlib`."""
    while frame is not None and frame.f_code.co_filename.startswith((folder, _CONTEXTLIB)):
        frame = frame.f_back
    return frame
