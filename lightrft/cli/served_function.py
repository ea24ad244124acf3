"""ServedFunction: a reward function or rule, as a component of the reward in a process of its own."""

import asyncio
from collections.abc import Sequence

from lightrft.config.arguments import RewardConfig
from lightrft.rewards.grading import Grading, PendingGrades
from lightrft.rewards.pool import GraderPool
from lightrft.rewards.recipes import plan_rewards
from lightrft.rewards.records import Grade, RewardInput

ROWS_OF_WORKER = 16
"""In a round, whose time the processes share."""
ROWS_TOGETHER = 512
"""In a round of a function that takes a batch, or awaits something."""


class ServedFunction:
    """Grades as a run does: a function of one response in processes that are replaced when they hang.

    Args:
        spec: As --reward_fn.
        num_workers: Processes.
        timeout_seconds: For one response.

    Raises:
        ValueError: There is no such function.
    """

    def __init__(self, spec: str, num_workers: int, timeout_seconds: float) -> None:
        self.name = spec
        self._plan = plan_rewards(RewardConfig(reward_fn=spec))
        (self._key,) = self._plan.functions
        pool = GraderPool([*self._plan.graders.values()], num_workers, timeout_seconds) if self._plan.graders else None
        self._grading = Grading(self._plan, pool, timeout_seconds)
        self._hanging: tuple[PendingGrades, str] | None = None
        self.rows_of_round = ROWS_TOGETHER if pool is None else ROWS_OF_WORKER * num_workers

    @property
    def trouble(self) -> str | None:
        """What became of a batch that was given up, for as long as the function has not come back from it."""
        if self._hanging is None or self._hanging[0].future.done():
            return None
        return self._hanging[1]

    def check_row(self, sample: RewardInput) -> None:
        """Raises ValueError where a parameter has no column."""
        self._plan.check_row(sample)

    def grade(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Grade]:
        """One grade for each input, in order.

        Raises:
            TimeoutError: A function that takes a batch has not come back from this one, or from one before.
        """
        if not inputs:
            return []
        if self.trouble is not None:
            # Its thread would not come to this batch.
            raise TimeoutError(self.trouble)
        (pending,) = self._grading.start(inputs, {self._key: range(len(inputs))})
        try:
            return pending.result()
        except TimeoutError as error:
            self._hanging = pending, str(error)
            raise

    def close(self) -> None:
        """Ends the processes."""
        self._grading.close()
