"""Rank processes for tests: real processes with a gloo group, in the environment that torchrun gives them."""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from lightrft.utils.imports import large_imports

ROOT = Path(__file__).parents[2]
START_SECONDS = 120
"""How long a process may take to import torch and to join the group, on a busy machine."""
GRACE_SECONDS = 3
"""How long the other ranks may go on after one has failed."""
GROUP_TIMEOUT = timedelta(seconds=60)


class RankTraceback(Exception):
    """Traceback text of a rank process: the cause of the exception that the test sees."""


@dataclass(frozen=True)
class RankResult:
    """How a process of `spawn_ranks` ended."""

    returncode: int
    stdout: str
    stderr: str
    value: Any
    """What the function returned; None also where it did not return."""


@dataclass(frozen=True)
class Outcome:
    """What one call of `Ranks.run` gave on one rank."""

    rank: int
    value: Any = None
    error: Exception | None = None
    traceback: str = ""


class Ranks:
    """A persistent group of ranks. A group with a rank that hangs or dies is replaced at the next call."""

    def __init__(self, world_size: int = 2) -> None:
        self.world_size = world_size
        self._processes: list[_Process] = []
        self._store: dist.TCPStore | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """`function(*args)` of each rank; `function` is defined at the top level of a module of the tests.

        Raises:
            Exception: what a rank raised (the first in time, if several did), with its traceback as the cause.
            TimeoutError: a rank did not return.
            ChildProcessError: a rank died.
        """
        if not self._processes:
            self._store, self._processes = _start(self.world_size, "serve", init_group=True)
        try:
            outcomes = self._call(function, args, timeout)
        except BaseException:
            self.close()
            raise
        failures = [outcome for outcome in outcomes if outcome.error is not None]
        if failures:
            self._replace_unless_in_step(len(outcomes))
            _raise(failures)
        return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._processes, self._store = [], None

    def _call(self, function: Callable[..., Any], args: Sequence[Any], timeout: float) -> list[Outcome]:
        """Outcomes as they arrive: of all ranks, or of fewer where one has failed and others then did not return."""
        payload = pickle.dumps((function, args))
        for process in self._processes:
            process.connection.send_bytes(payload)
        outcomes: list[Outcome] = []
        waiting = {process.connection: process for process in self._processes}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = [waiting.pop(connection) for connection in _ready(waiting, deadline)]
            outcomes += [process.receive() for process in ready]
            failed = any(outcome.error is not None for outcome in outcomes)
            if failed:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not ready and failed:
                return outcomes
            if not ready:
                names = sorted(process.rank for process in waiting.values())
                raise TimeoutError(f"{function.__qualname__} did not return on ranks {names} within {timeout} s")
        return outcomes

    def _replace_unless_in_step(self, num_outcomes: int) -> None:
        """After a failure, ranks may have run different numbers of collectives."""
        if num_outcomes < self.world_size:
            return self.close()
        try:
            meetings = self._call(dist.barrier, (), GRACE_SECONDS)
        except (TimeoutError, ChildProcessError):
            return self.close()
        if any(meeting.error is not None for meeting in meetings):
            self.close()


def spawn_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, init_group: bool = True
) -> list[RankResult]:
    """`function(*args)` on fresh processes that may kill themselves or be ended: how each of them ended.

    An exception of the function ends its process as in any script. The timeout starts once all processes are up.

    Raises:
        TimeoutError: a process was still there at the timeout; all are killed.
    """
    with contextlib.ExitStack() as files:
        outputs = [
            [files.enter_context(tempfile.TemporaryFile("w+")) for _ in ("stdout", "stderr")] for _ in range(world_size)
        ]
        _store, processes = _start(world_size, "run_once", init_group, outputs)
        try:
            values = _run_to_the_end(processes, pickle.dumps((function, args)), time.monotonic() + timeout)
            hung = [process.rank for process in processes if process.popen.poll() is None]
        finally:
            for process in processes:
                process.kill()
        texts = [(_read(stdout), _read(stderr)) for stdout, stderr in outputs]
    if hung:
        errors = "".join(f"\n--- rank {rank} ---\n{stderr}" for rank, (_, stderr) in enumerate(texts))
        raise TimeoutError(f"{function.__qualname__}: ranks {hung} were still there after {timeout} s{errors}")
    return [
        RankResult(process.popen.returncode, *texts[process.rank], value=values.get(process.rank))
        for process in processes
    ]


class _Process:
    """One rank's process, and this side of its connection."""

    def __init__(
        self, rank: int, command: Callable[[int], list[str]], env: dict[str, str], files: Sequence[IO]
    ) -> None:
        self.rank = rank
        self.connection, theirs = Pipe()
        stdout, stderr = files or (None, None)
        self.popen = subprocess.Popen(
            command(theirs.fileno()), env=env, cwd=ROOT, stdout=stdout, stderr=stderr, pass_fds=[theirs.fileno()]
        )
        theirs.close()

    def receive(self) -> Any:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise ChildProcessError(f"rank {self.rank} died with code {self.popen.wait()}") from None

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.connection.close()


def _start(
    world_size: int, entry: str, init_group: bool, outputs: Sequence[Sequence[IO]] = ()
) -> tuple[dist.TCPStore, list[_Process]]:
    """Processes that have joined their group, and the store they met in: this process hosts it, as torchrun does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def command(fd: int) -> list[str]:
        return [sys.executable, "-c", f"from tests.distributed.ranks import {entry}; {entry}({fd}, {init_group})"]

    processes: list[_Process] = []
    try:
        for rank in range(world_size):
            env = _environment(rank, world_size, store.port)
            processes.append(_Process(rank, command, env, outputs[rank] if outputs else ()))
        for process in processes:
            if not process.connection.poll(START_SECONDS):
                raise TimeoutError(f"rank {process.rank} did not start within {START_SECONDS} s")
            process.receive()
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return store, processes


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def _ready(waiting: dict[Connection, _Process], deadline: float) -> list[Connection]:
    """The connections with a message or at their end; none once the deadline has passed."""
    return wait(list(waiting), max(0.0, deadline - time.monotonic()))  # type: ignore[return-value]


def _run_to_the_end(processes: Sequence[_Process], payload: bytes, deadline: float) -> dict[int, Any]:
    """Returned values by rank, once all processes have ended or the deadline has passed."""
    values: dict[int, Any] = {}
    waiting = {process.connection: process for process in processes}
    for process in processes:
        process.connection.send_bytes(payload)
    while waiting and (ready := _ready(waiting, deadline)):
        for connection in ready:
            process = waiting[connection]
            try:
                values[process.rank] = process.receive()
            except ChildProcessError:
                del waiting[connection]
    return values


def _read(file: IO) -> str:
    file.seek(0)
    return file.read()


def _raise(failures: Sequence[Outcome]) -> None:
    first = failures[0]
    assert first.error is not None
    for other in failures[1:]:
        first.error.add_note(f"rank {other.rank} raised as well: {other.error!r}")
    raise first.error from RankTraceback(f"on rank {first.rank}:\n{first.traceback}")


# What follows runs in the rank processes.


def serve(fd: int, init_group: bool) -> None:
    """One rank of `Ranks`: answers calls until it is killed."""
    connection, calls = _join(fd, init_group)
    while True:
        connection.send_bytes(_answer(calls.get()))


def run_once(fd: int, init_group: bool) -> None:
    """One rank of `spawn_ranks`."""
    connection, calls = _join(fd, init_group)
    with large_imports():
        function, args = pickle.loads(calls.get())
    connection.send_bytes(pickle.dumps(function(*args)))
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(fd: int, init_group: bool) -> tuple[Connection, "queue.SimpleQueue[bytes]"]:
    torch.set_num_threads(1)
    connection = Connection(fd)
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive_calls, args=(connection, calls), daemon=True).start()
    if init_group:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    connection.send_bytes(pickle.dumps("ready"))
    return connection, calls


def _receive_calls(connection: Connection, calls: "queue.SimpleQueue[bytes]") -> None:
    """Also ends this process once the parent is gone, even while the main thread hangs in a collective."""
    while True:
        try:
            calls.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


def _answer(payload: bytes) -> bytes:
    rank = dist.get_rank()
    try:
        with large_imports():
            function, args = pickle.loads(payload)
        return pickle.dumps(Outcome(rank, value=function(*args)))
    except Exception as error:
        return pickle.dumps(Outcome(rank, error=_portable(error), traceback=traceback.format_exc()))


def _portable(error: Exception) -> Exception:
    """The error itself where it survives pickling, else its text."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
