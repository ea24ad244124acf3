"""The end of a process after an exception that nobody caught: it comes, whatever threads are left."""

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

EXIT_SECONDS = 10.0
"""How long the interpreter may take to end by itself."""
_STDERR = 2


def end_after_uncaught_exception() -> Callable[[], None]:
    """From now on an uncaught exception ends this process within `EXIT_SECONDS`, its traceback printed as before.

    The interpreter itself waits for threads. One in a pool of a user's reward function may hang for ever, and torchrun
    ends the other ranks only after one has ended.

    Returns:
        What puts the earlier hook back.
    """
    report = sys.excepthook

    def report_and_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        timer = threading.Timer(EXIT_SECONDS, _end)
        timer.daemon = True
        timer.start()
        report(kind, error, trace)

    def undo() -> None:
        sys.excepthook = report

    sys.excepthook = report_and_end
    return undo


def _end() -> None:
    others = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
    message = f"ERROR: this process failed {EXIT_SECONDS:g} s ago and is ended now. Threads left: {others}.\n"
    os.write(_STDERR, message.encode())
    os._exit(1)
