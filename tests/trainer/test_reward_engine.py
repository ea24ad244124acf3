import asyncio

from lightrft.rewards.functions import RewardFunction
from lightrft.trainer.reward_engine import RewardComputationEngine
from tests import tiny_models
from tests.distributed.runs import fsdp


def scores_of_two_steps() -> list[float | None]:
    lock = asyncio.Lock()

    async def score(response: str) -> float:
        async with lock:
            await asyncio.sleep(0)
        return 1.0

    with fsdp() as strategy:
        engine = RewardComputationEngine(strategy, RewardFunction("score", score))
        scores = []
        for _ in range(2):
            engine.submit([tiny_models.sample([3], [4], index=index) for index in range(2)])
            scores += [output.score for output in engine.result()]
    return scores


def test_what_an_async_reward_keeps_between_steps_stays_usable(two_ranks):
    """A lock that was waited for belongs to a loop, and raises under another."""
    assert two_ranks.run(scores_of_two_steps) == [[1.0] * 4] * 2
