"""The host's process: SGLang's engine in a process of its own, at the end of a pipe.

    python -m lightrft.strategy.sglang_utils.host_process DESCRIPTOR PARENT

`host.EngineHost` starts it as the leader of a session: its process group is what SGLang has started, and no more.
"""

import asyncio
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import active_children
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from lightrft.strategy.sglang_utils import library

FAILED = "a process of it has failed, as it says above"
_POLL_SECONDS = 0.2


def main(descriptor: int, parent: int) -> None:
    """Starts the engine with the arguments that come first, then answers calls until the rank hangs up."""
    # The ranks alone decide what a signal to all processes of a job means. SGLang's processes inherit it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = Pipe(Connection(descriptor))
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    try:
        engine = library.start_engine(pipe.connection.recv())
        description = library.describe(engine)
        children = active_children()
        engine.loop.run_until_complete(_handle_signals(pipe, children))
        pipe.send("answer", description)
    except BaseException:
        pipe.send("error", traceback.format_exc())
        end_group()
        raise
    is_over = threading.Event()
    threading.Thread(target=_end_with_children, args=(pipe, children, is_over), daemon=True).start()
    answer_calls(engine, pipe)
    is_over.set()
    engine.shutdown()
    end_group()


class Pipe:
    """The connection to the rank, which two threads may write to."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        with self._lock:
            self.connection.send((kind, content))

    def fail(self, reason: str) -> None:
        """Last words."""
        try:
            self.send("ended", reason)
        finally:
            end_group()


def answer_calls(engine: library.Engine, pipe: Pipe) -> None:
    """Calls the functions that come, with the engine as their first argument."""
    while True:
        try:
            call = pipe.connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            function: Callable[..., Any]
            function, arguments = pickle.loads(call)
            answer = "answer", function(engine, *arguments)
        except Exception:
            answer = "error", traceback.format_exc()
            # Where a process of SGLang has ended, that is the reason, and another thread is about to say so.
            time.sleep(2 * _POLL_SECONDS)
        pipe.send(*answer)


async def _handle_signals(pipe: Pipe, children: Sequence[BaseProcess]) -> None:
    """Takes the place of SGLang's handlers, which end the process without a word to the rank."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGQUIT, lambda: pipe.fail(ended_child(children) or FAILED))
    loop.add_signal_handler(signal.SIGTERM, lambda: None)


def ended_child(children: Sequence[BaseProcess]) -> str | None:
    """Which of SGLang's processes has ended, if any. Where one does, those that wait for it fail soon after."""
    for child in children:
        if child.exitcode is not None:
            return f"its process {child.name} (pid {child.pid}) has ended with exit code {child.exitcode}"
    return None


def _end_with_parent(parent: int) -> None:
    # The main thread may be in the middle of a long call, and the pipe's other end may have been inherited.
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    end_group()


def _end_with_children(pipe: Pipe, children: Sequence[BaseProcess], is_over: threading.Event) -> None:
    while not is_over.wait(_POLL_SECONDS):
        if ended := ended_child(children):
            pipe.fail(ended)


def end_group() -> None:
    """Ends this process, and all that SGLang has started."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
