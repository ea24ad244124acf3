"""RewardComputationEngine: scores of samples, computed while the models run."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from lightrft.rewards.functions import RewardFunction
from lightrft.rewards.records import RewardInput, RewardOutput
from lightrft.rewards.worker import RewardWorker
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.types import Experience, PromptExample


class RewardComputationEngine:
    """Calls the reward function in the run's reward thread, and raises its errors on all ranks alike."""

    def __init__(self, strategy: StrategyBase, reward_fn: RewardFunction) -> None:
        self.strategy = strategy
        self.reward_fn = reward_fn
        self._worker: RewardWorker[list[RewardOutput]] = RewardWorker()
        self._pending: Future[list[RewardOutput]] | None = None

    def submit(self, samples: Sequence[Experience]) -> None:
        """Starts to score `samples`; `result` waits for it."""
        assert self._pending is None, "the result of an earlier submission was not taken"
        inputs = [reward_input(sample.example, sample.response, sample.finish_reason) for sample in samples]
        self._pending = self._worker.submit(partial(self.reward_fn, inputs))

    def result(self) -> list[RewardOutput]:
        """Scores of the submitted samples, in their order. Every rank must call it.

        Raises:
            PhaseError: The reward function failed on some rank; the message holds that rank's traceback.
        """
        pending, self._pending = self._pending, None
        assert pending is not None, "submit comes first"
        outputs: list[RewardOutput] = []
        with self.strategy.collectives.collect("rewards"):
            outputs = pending.result()
        return outputs


def reward_input(example: PromptExample, response: str, finish_reason: str) -> RewardInput:
    return RewardInput(
        prompt=example.prompt,
        response=response,
        label=example.label,
        reference=example.reference,
        extra=example.extra,
        row=example.row,
        finish_reason=finish_reason,
    )
