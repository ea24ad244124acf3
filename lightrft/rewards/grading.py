"""Grading: grades of functions, services and grader processes, computed in threads while the run goes on."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from lightrft.rewards.functions import RewardFunction, traceback_text
from lightrft.rewards.grader_server import GradeItem
from lightrft.rewards.pool import GraderPool
from lightrft.rewards.recipes import RewardPlan
from lightrft.rewards.records import Fault, Grade, RewardInput
from lightrft.rewards.worker import Job, RewardWorker

BATCH_ALLOWANCE = 20
"""What a function in the reward thread has for its whole batch, in times of --reward_timeout_seconds."""
Slot: TypeAlias = tuple[str, int]
"""Key of a component's part, and which of the inputs it is graded for."""
Rows: TypeAlias = Mapping[str, Sequence[int]]
"""Which of the inputs have a part, by its key."""


@dataclass(frozen=True)
class PendingGrades:
    """Grades that one source is computing, one for each slot."""

    source: str
    slots: Sequence[Slot]
    future: Future[list[Grade]]
    deadline: float | None
    """None where it ends by itself."""
    seconds: float | None
    """How long it had until then."""

    def result(self) -> list[Grade]:
        """The grades; what the source raises is a fault of each of them.

        Raises:
            TimeoutError: There are none at the deadline.
        """
        wait([self.future], None if self.deadline is None else max(0.0, self.deadline - time.monotonic()))
        if not self.future.done():
            raise TimeoutError(
                f"{self.source} has not ended after {self.seconds:g} s with its batch of {len(self.slots)} responses, "
                f"{BATCH_ALLOWANCE} times --reward_timeout_seconds. If it does not hang, raise that."
            )
        error = self.future.exception()
        if error is None:
            return self.future.result()
        return [Grade(None, fault=Fault("error", f"{self.source} failed:\n{traceback_text(error)}"))] * len(self.slots)


class Grading:
    """Threads in which the components of the reward are graded, but for those of local models.

    Functions have one thread together, since a user's module may keep what belongs to it; each service and the grader
    processes have one more, so that they are waited for at the same time.

    Args:
        plan: What grades each component.
        pool: Processes for its graders; None where it has none.
        timeout_seconds: For one row.
    """

    def __init__(self, plan: RewardPlan, pool: GraderPool | None, timeout_seconds: float) -> None:
        self._plan = plan
        self._pool = pool
        self._allowance = BATCH_ALLOWANCE * timeout_seconds
        self._threads: dict[str, RewardWorker[list[Grade]]] = defaultdict(RewardWorker)

    def start(self, inputs: Sequence[RewardInput], rows: Rows) -> list[PendingGrades]:
        """Begins to grade the parts' rows."""
        return [
            *self._start_graders(inputs, rows),
            *self._start_services(inputs, rows),
            *self._start_functions(inputs, rows),
        ]

    def close(self) -> None:
        """Ends the grader processes."""
        if self._pool is not None:
            self._pool.close()

    def _start_graders(self, inputs: Sequence[RewardInput], rows: Rows) -> Iterator[PendingGrades]:
        slots = [(key, i) for key in self._plan.graders for i in rows.get(key, ())]
        if slots:
            assert self._pool is not None, "graders have a pool"
            numbers = {key: number for number, key in enumerate(self._plan.graders)}
            items = [GradeItem(numbers[key], _sent(self._plan.functions[key], inputs[i])) for key, i in slots]
            yield self._start("grader processes", slots, partial(_grades_of_pool, self._pool, items), "graders")

    def _start_services(self, inputs: Sequence[RewardInput], rows: Rows) -> Iterator[PendingGrades]:
        for key, service in self._plan.services.items():
            if mine := rows.get(key):
                job = partial(service.grade, [inputs[i] for i in mine])
                yield self._start(service.name, [(key, i) for i in mine], job, key)

    def _start_functions(self, inputs: Sequence[RewardInput], rows: Rows) -> Iterator[PendingGrades]:
        for key, function in self._plan.functions.items():
            if key not in self._plan.graders and (mine := rows.get(key)):
                job = partial(function.grade, [inputs[i] for i in mine])
                yield self._start(function.name, [(key, i) for i in mine], job, "functions", self._allowance)

    def _start(
        self, source: str, slots: Sequence[Slot], job: Job[list[Grade]], thread: str, seconds: float | None = None
    ) -> PendingGrades:
        deadline = None if seconds is None else time.monotonic() + seconds
        return PendingGrades(source, slots, self._threads[thread].submit(job), deadline, seconds)


def _sent(function: RewardFunction, sample: RewardInput) -> RewardInput:
    """The sample without images and sounds, messages' among them, that the function would not look at."""
    return replace(sample, messages=None, media=sample.media if function.takes_media else {})


def _grades_of_pool(pool: GraderPool, items: Sequence[GradeItem], runner: asyncio.Runner) -> list[Grade]:
    return pool.grade(items)
