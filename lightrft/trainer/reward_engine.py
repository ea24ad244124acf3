"""RewardComputationEngine: scores of samples, computed while the models run."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from lightrft.rewards.functions import RewardFunction
from lightrft.rewards.records import RewardInput, RewardOutput
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.types import Experience, PromptExample


class RewardComputationEngine:
    """Calls the reward function in a thread of its own, and raises its errors on all ranks alike."""

    def __init__(self, strategy: StrategyBase, reward_fn: RewardFunction) -> None:
        self.strategy = strategy
        self.reward_fn = reward_fn
        self._pending: Future[list[RewardOutput]] | None = None

    def submit(self, samples: Sequence[Experience]) -> None:
        """Starts to score `samples`; `result` waits for it."""
        assert self._pending is None, "the result of an earlier submission was not taken"
        inputs = [reward_input(sample.example, sample.response, sample.finish_reason) for sample in samples]
        self._pending = _in_daemon_thread(lambda: self.reward_fn(inputs))

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


def _in_daemon_thread(function: Callable[[], list[RewardOutput]]) -> Future[list[RewardOutput]]:
    """A future of `function()`, whose thread does not keep a dying process alive."""
    future: Future[list[RewardOutput]] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:
            # A SystemExit, of a grader that runs a model's code say, would end this rank alone and without a word.
            failure = RuntimeError(f"the reward function ended its thread by {error!r}")
            failure.__cause__ = error
            future.set_exception(failure)

    threading.Thread(target=run, name="rewards", daemon=True).start()
    return future
