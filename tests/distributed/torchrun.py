"""torchrun commands, run to their end: what they said, how long they took, and what they left behind."""

import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

TOKEN = "LIGHTRFT_TEST_RUN"
"""Variable in the environment of every process of a run, which tells them from all others."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    returncode: int
    output: str
    """stdout and stderr."""
    seconds: float
    ended: float
    """`time.time()` then."""
    left: list[str]
    """Command lines of processes of the run that were still there; they are killed now."""


def torchrun(
    script: str | Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    terminal: bool = False,
    timeout: float = 90,
    launch: Sequence[str] = ("--standalone", "--nproc_per_node=2"),
    grace: float = 0.0,
) -> Ended:
    """The script on two ranks, without standard input.

    Args:
        launch: Flags of torchrun itself, for other ranks than these.
        terminal: Output goes to a terminal, as it does for a person, and not to a file.
        grace: Seconds that processes may take to end after torchrun itself.

    Raises:
        TimeoutError: It did not end; its processes are killed.
    """
    token = uuid.uuid4().hex
    settings = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TERM": "xterm"}
    settings["CUDA_VISIBLE_DEVICES"] = ""
    output = _Terminal() if terminal else _File()
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launch, str(script), *flags],
        env={**os.environ, **settings, TOKEN: token, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=output.fd,
        stderr=output.fd,
    )
    try:
        returncode = process.wait(timeout)
        seconds, ended = time.monotonic() - started, time.time()
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"still there after {timeout} s: {_kill(token)}\n{output.read()}") from None
    psutil.wait_procs(_processes(token), timeout=grace)
    return Ended(returncode, output.read(), seconds, ended, _kill(token))


class _File:
    def __init__(self) -> None:
        self.fd, name = tempfile.mkstemp()
        os.unlink(name)

    def read(self) -> str:
        with open(self.fd, "rb") as file:
            file.seek(0)
            return file.read().decode(errors="replace")


class _Terminal:
    """A pseudo-terminal, read as fast as it is written to."""

    def __init__(self) -> None:
        self._controller, self.fd = pty.openpty()
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._collect, daemon=True)
        self._reader.start()

    def _collect(self) -> None:
        try:
            while part := os.read(self._controller, 65536):
                self._parts.append(part)
        except OSError:
            pass  # How Linux says that nobody writes any more.

    def read(self) -> str:
        os.close(self.fd)
        self._reader.join(timeout=10)
        os.close(self._controller)
        return b"".join(self._parts).decode(errors="replace").replace("\r\n", "\n")


def _kill(token: str) -> list[str]:
    """Kills what is left of a run; returns the command lines."""
    found = _processes(token)
    for process in found:
        process.kill()
    return [" ".join(process.info["cmdline"]) for process in found]


def _processes(token: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if _token_of(process) == token]


def _token_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(TOKEN)
    except psutil.Error:
        return None  # Another user's, or one that has just ended.
