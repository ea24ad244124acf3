"""RewardWorker: a thread with one event loop, in which what a run waits for is computed beside it."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeAlias, TypeVar

Result = TypeVar("Result")
Job: TypeAlias = Callable[[asyncio.Runner], Result]


class RewardWorker(Generic[Result]):
    """Runs jobs one after the other, and ends with the last reference to it.

    Thread and loop stay the same, so that what a user's module keeps from call to call stays usable: an async client
    or lock, a connection to SQLite, a thread-local.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Job[Result], Future[Result]] | None] = SimpleQueue()
        # A daemon: a reward function that hangs does not keep a dying process alive.
        threading.Thread(target=_work, args=(self._jobs,), name="rewards", daemon=True).start()

    def __del__(self) -> None:
        self._jobs.put(None)

    def submit(self, job: Job[Result]) -> Future[Result]:
        """A future of `job(runner)`, where `runner` runs what is async."""
        future: Future[Result] = Future()
        self._jobs.put((job, future))
        return future


def _work(jobs: SimpleQueue[tuple[Job[Result], Future[Result]] | None]) -> None:
    with asyncio.Runner() as runner:
        while (item := jobs.get()) is not None:
            _fulfil(*item, runner)


def _fulfil(job: Job[Result], future: Future[Result], runner: asyncio.Runner) -> None:
    try:
        future.set_result(job(runner))
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:
        # A SystemExit, of a grader that runs a model's code say, would end this rank alone and without a word.
        failure = RuntimeError(f"the reward function ended its thread by {error!r}")
        failure.__cause__ = error
        future.set_exception(failure)
