"""Ending a process with all that it has started."""

import contextlib
import os
import signal

import psutil


def kill_tree(pid: int) -> None:
    """Kills a child that nobody has waited for yet, its process group, and its descendants in sessions of their own.

    What has left the tree, as a daemon does whose parent has ended, is not found.
    """
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(pid).children(recursive=True)
    # It may be so young that it has no group of its own yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
