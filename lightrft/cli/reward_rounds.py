"""Rounds: requests for rewards that share the work."""

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from lightrft.rewards.records import Fault, Grade, RewardInput, RewardSource
from lightrft.rewards.worker import RewardWorker

Waiting: TypeAlias = tuple[Sequence[RewardInput], asyncio.Future[list[Grade]]]
"""The rows of a request, and what becomes of them."""
GATHERING_SECONDS = 0.003
"""How long the first request of a round waits for others."""


class Served(RewardSource, Protocol):
    """What is served."""

    rows_of_round: int
    """Responses that it is given at a time, unless one request alone has more."""

    @property
    def trouble(self) -> str | None:
        """Why it grades nothing now; None where it does."""
        ...

    def close(self) -> None: ...


class Rounds:
    """Grades rows in rounds: requests that come together, or while another round is graded, share one call.

    Args:
        served: What grades, in a thread of its own.
    """

    def __init__(self, served: Served) -> None:
        self.served = served
        self._worker: RewardWorker[list[Grade]] = RewardWorker()
        self._waiting: list[Waiting] = []
        self._rounds: asyncio.Task[None] | None = None

    async def grade(self, inputs: Sequence[RewardInput]) -> list[Grade]:
        """One grade for each input, in order; raises what the source raises for them."""
        answer: asyncio.Future[list[Grade]] = asyncio.get_running_loop().create_future()
        self._waiting.append((inputs, answer))
        if self._rounds is None:
            self._rounds = asyncio.create_task(self._grade_all())
        # A request that is given up must not end the round that it is in.
        return await asyncio.shield(answer)

    async def _grade_all(self) -> None:
        try:
            await asyncio.sleep(GATHERING_SECONDS)
            while self._waiting:
                await self._grade_round(self._next_round())
        finally:
            self._rounds = None

    def _next_round(self) -> list[Waiting]:
        count, rows = 1, len(self._waiting[0][0])
        while count < len(self._waiting) and rows + len(self._waiting[count][0]) <= self.served.rows_of_round:
            rows += len(self._waiting[count][0])
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    async def _grade_round(self, requests: Sequence[Waiting]) -> None:
        inputs = [sample for samples, _ in requests for sample in samples]
        try:
            grades = await asyncio.wrap_future(self._worker.submit(lambda runner: self.served.grade(inputs, runner)))
            assert len(grades) == len(inputs), "a source gives one grade for each input"
        except Exception as error:
            # What hangs would hang again for each of them.
            if len(requests) == 1 or isinstance(error, TimeoutError):
                for _, answer in requests:
                    answer.set_exception(error)
                return
            grades = [Grade(None, fault=Fault("error", str(error)))] * len(inputs)
        given = iter(grades)
        for samples, answer in requests:
            own = [next(given) for _ in samples]
            if len(requests) > 1 and any(grade.fault is not None and grade.fault.kind == "error" for grade in own):
                # A function of a batch may have failed by another request's row.
                await self._grade_round([(samples, answer)])
            else:
                answer.set_result(own)
