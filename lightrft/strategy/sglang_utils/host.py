"""EngineHost: the process in which SGLang's engine lives, as the rank that owns it sees it."""

import contextlib
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

_MODULE = "lightrft.strategy.sglang_utils.host_process"
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_")
_EXIT_SECONDS = 10.0
"""How long SGLang may take to give its memory back at the end of a run."""


class EngineHost:
    """One call at a time.

    The engine has a process of its own since it does to its process what a rank cannot bear: it kills all children, at
    every exit; sets handlers of signals, multiprocessing's start method, the logs and variables of the environment; and
    ends it without a word where a scheduler fails. Nor does it start under torchrun's variables.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """`arguments` are fields of `sglang.ServerArgs`. Returns at once."""
        self._connection, far_end = Pipe()
        with far_end:
            descriptor = far_end.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(descriptor), str(os.getpid())],
                env=host_environment(os.environ),
                pass_fds=[descriptor],
                start_new_session=True,
            )
        self._close = weakref.finalize(self, _close, self._connection, self._process)
        self._connection.send(dict(arguments))

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function(engine, *arguments)` gives there; the function must have a name in a module.

        Raises:
            RuntimeError: It failed, or SGLang has ended.
        """
        self.begin(function, *arguments)
        return self.receive()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Starts a call whose answer `receive` waits for."""
        try:
            self._connection.send((function, arguments))
        except OSError:
            raise self._ended() from None

    def wait_for_start(self) -> dict[str, Any]:
        """`library.describe`, once the engine is there. Comes before any call.

        Raises:
            RuntimeError: It does not start.
        """
        try:
            return self.receive()
        except RuntimeError as error:
            hint = "What SGLang calls --mem-fraction-static in its messages is --engine_mem_util here."
            raise RuntimeError(f"{error}\n{hint}") from None

    def receive(self) -> Any:
        """The answer of the call that was begun."""
        try:
            kind, content = self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if kind == "ended":
            raise RuntimeError(f"SGLang has ended: {content}.")
        if kind == "error":
            raise RuntimeError(f"SGLang failed:\n{content}")
        return content

    def check_working(self) -> None:
        """Raises RuntimeError where SGLang has ended, or its answer is there while the call must still be at work."""
        if self._connection.poll():
            answer = self.receive()
            raise RuntimeError(f"SGLang has ended a call too early: {answer}.")

    def close(self) -> None:
        """Ends SGLang, and returns when its memory is free."""
        self._close()

    def _ended(self) -> RuntimeError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        return RuntimeError(f"SGLang has ended (exit code {self._process.returncode}); its own messages are above.")


def host_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of the host's process: those of this one, without what torchrun says to its ranks."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in _TORCHRUN and not name.startswith(_TORCHRUN_PREFIXES)
    }
    # Some tokens of slack are asked for, beyond the model's own context. No request uses them.
    return kept | {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}


def _close(connection: Connection, process: "subprocess.Popen[bytes]") -> None:
    connection.close()
    try:
        process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
