"""Grader server: the process that forks a rank's grader processes, and what these do.

It is a process of its own since a rank cannot be forked: it has threads, CUDA and process groups. Nor can it be started
by multiprocessing's forkserver, which would run the user's training script again in every grader.
"""

import asyncio
import ctypes
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lightrft.rewards import expressions
from lightrft.rewards.functions import RewardFunction, resolve_reward, traceback_text
from lightrft.rewards.process_tree import kill_tree
from lightrft.rewards.records import Fault, Grade, RewardInput

REQUEST = struct.Struct("!ci")
"""What is asked, and of which process."""
START, END = b"s", b"e"
REPLY = struct.Struct("!i")
"""The new process, or how it ended."""
LOOK_SECONDS = 1.0
"""How often the server looks whether its rank is still there: a child of the rank may hold the connection open."""
MEMORY_BYTES = 2 * 2**30
"""Memory that grading may take, beyond what a process has when its functions are loaded."""
STATM = Path("/proc/self/statm")
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent has died."""


@dataclass(frozen=True)
class GraderSpec:
    """Where a grader process finds a function."""

    spec: str
    options: Mapping[str, Any]

    def load(self) -> RewardFunction:
        return resolve_reward(self.spec, self.options)


@dataclass(frozen=True)
class GradeItem:
    """What is to be graded, and by which of the functions."""

    grader: int
    sample: RewardInput


@dataclass(frozen=True)
class Reply:
    grade: Grade
    goes_on: bool = True
    """Whether the process can grade another one."""


def serve(fd: int, has_rules: bool) -> None:
    """Starts and ends processes as the rank asks for it; they and the server end with the rank."""
    parent = os.getppid()
    if has_rules:
        # Before anything is forked, so that no process takes a second for it.
        expressions.preload()
    with socket.socket(fileno=fd) as control:
        children: set[int] = set()
        try:
            while os.getppid() == parent:
                if wait([control], LOOK_SECONDS) and not _answer(control, children):
                    return
        finally:
            for pid in children:
                _kill(pid)


def _answer(control: socket.socket, children: set[int]) -> bool:
    """Does what the rank asks for next; False where it will ask no more."""
    message, fds, _, _ = socket.recv_fds(control, REQUEST.size, 1)
    if not message:
        return False
    what, pid = REQUEST.unpack(message)
    if what == START:
        # What a grader starts must not hold its connection open.
        os.set_inheritable(fds[0], False)
        pid = _fork(control, fds[0])
        os.close(fds[0])
        children.add(pid)
        control.sendall(REPLY.pack(pid))
    else:
        children.remove(pid)
        control.sendall(REPLY.pack(_kill(pid)))
    return True


def _fork(control: socket.socket, fd: int) -> int:
    pid = os.fork()
    if pid > 0:
        return pid
    code = 1
    try:
        # A group of its own: what a grader has started ends with it.
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        control.close()
        work(Connection(fd))
        code = 0
    except ConnectionError:
        code = 0  # The rank has gone.
    except BaseException:
        traceback.print_exc()
    finally:
        # Nothing that the server has registered for its own end may run here.
        os._exit(code)


def _kill(pid: int) -> int:
    """Ends a child and what it has started; its exit code, or its signal's negative."""
    kill_tree(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def work(connection: Connection) -> None:
    """One grader process: loads the functions, says that it has (None, or what went wrong), then grades row by row."""
    own = os.getpid()
    try:
        functions = [spec.load() for spec in pickle.loads(connection.recv_bytes())]
    except BaseException as error:
        return connection.send(
            Fault("error", f"a grader process could not load its functions:\n{traceback_text(error)}")
        )
    limit_memory()
    connection.send(None)
    with asyncio.Runner() as runner:
        goes_on = True
        while goes_on:
            try:
                payload = connection.recv_bytes()
            except EOFError:
                return
            reply = grade(functions, payload, runner)
            if os.getpid() != own:
                # A copy that the function has forked: its answer would be taken for the next row's.
                os._exit(0)
            # A process that is killed later loses what its functions have printed.
            sys.stdout.flush()
            connection.send(reply)
            goes_on = reply.goes_on


def grade(functions: Sequence[RewardFunction], payload: bytes, runner: asyncio.Runner) -> Reply:
    """The grade of a pickled GradeItem."""
    where = "a row that could not be sent"
    try:
        item: GradeItem = pickle.loads(payload)
        where = f"{functions[item.grader].name}, row {item.sample.row}"
        [graded] = functions[item.grader].grade([item.sample], runner)
        return Reply(graded)
    except MemoryError:
        message = f"{where}: it took more than the {MEMORY_BYTES / 2**30:g} GiB of memory that grading may take"
        # What has filled the memory may still be there.
        return Reply(Grade(None, fault=Fault("ungradable", message)), goes_on=False)
    except BaseException as error:
        return Reply(Grade(None, fault=Fault("error", f"{where}:\n{traceback_text(error)}")))


def limit_memory() -> None:
    """Allocations beyond the limit raise MemoryError; there is none where the system does not say what is taken."""
    if not STATM.exists():
        return
    taken = int(STATM.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = taken + MEMORY_BYTES
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
