"""GraderProcesses: a rank's side of its grader server."""

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from lightrft.rewards.grader_server import END, REPLY, REQUEST, START, GraderSpec
from lightrft.rewards.rules import RULES

SERVER_SECONDS = 120.0
"""How long the server may take to answer; the first time it imports the rules before."""
END_SECONDS = 10.0
"""How long it may take to end the processes, before it is killed itself."""
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lightrft.rewards.grader_server import serve; serve(int(sys.argv[2]), sys.argv[3] == 'rules')"
)
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A grader is one of many on its machine, and each thread takes of the memory that it may have."""


class GraderProcesses:
    """Starts and ends grader processes. All of them end when this process does, however that happens.

    Args:
        specs: The functions that each process loads.
    """

    def __init__(self, specs: Sequence[GraderSpec]) -> None:
        self._specs = pickle.dumps(list(specs))
        self._kind = "rules" if any(spec.spec in RULES for spec in specs) else "functions"
        self._server: subprocess.Popen | None = None
        self._control: socket.socket | None = None

    def ensure_server(self) -> bool:
        """Starts the server where there is none (any more), without waiting for it; whether it is a new one."""
        if self._server is not None and self._server.poll() is None:
            return False
        self.close()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(SERVER_SECONDS)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps([*map(str, sys.path)]), str(theirs.fileno()), self._kind],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **THREADS},
                pass_fds=[theirs.fileno()],
                # Ctrl-C in a terminal is for the ranks alone.
                process_group=0,
            )
        return True

    def start(self) -> tuple[int, Connection]:
        """A new process and the connection to it, over which it will say that it is ready."""
        ours, theirs = Pipe()
        with theirs:
            pid = self._ask(START, 0, [theirs.fileno()])
        # One that has ended already is seen by reading from it.
        with contextlib.suppress(BrokenPipeError):
            ours.send_bytes(self._specs)
        return pid, ours

    def end(self, pid: int) -> int:
        """Kills a process, if it is still there; its exit code, or its signal's negative."""
        return self._ask(END, pid)

    def close(self) -> None:
        """Ends the server and all processes."""
        server, control = self._server, self._control
        self._server = self._control = None
        if server is None or control is None:
            return
        control.close()
        try:
            server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    def _ask(self, what: bytes, pid: int, fds: Sequence[int] = ()) -> int:
        assert self._control is not None, "ensure_server comes first"
        # Asking one that has ended fails, or its answer is empty, as it happens.
        reply = b""
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(self._control, [REQUEST.pack(what, pid)], fds)
            reply = self._control.recv(REPLY.size)
        if not reply:
            raise ConnectionError("the process that starts the graders has ended.")
        return REPLY.unpack(reply)[0]
