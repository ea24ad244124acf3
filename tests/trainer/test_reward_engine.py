import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from lightrft.config import RewardConfig
from lightrft.rewards.functions import RewardFunction
from lightrft.rewards.pool import GraderPool
from lightrft.rewards.recipes import plan_rewards
from lightrft.rewards.records import Fault, Grade, RewardInput, RewardOutput, RewardSource
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.collectives import PhaseError
from lightrft.trainer.reward_engine import RewardComputationEngine
from lightrft.trainer.reward_setup import start_graders
from lightrft.types import Experience
from tests import tiny_models
from tests.distributed.runs import config, fsdp

GRADERS = """
import os, sys, time

def f(response, label, finish_reason):
    match response:
        case "hang": time.sleep(600)
        case "recurse": return f(response, label, finish_reason)
        case "allocate": return bytearray(2**45)
        case "raise": raise KeyError("theirs")
        case "nan": return float("nan")
        case "text": return "1"
        case "die": os._exit(3)
    return {"score": 1.0, "length": len(response)}
"""
BAD = ("hang", "recurse", "allocate", "raise", "nan", "text", "die")
LIMIT = 0.5
SLACK = 2.0
"""Seconds that a busy machine may take besides."""


def engine_of(
    strategy: StrategyBase,
    options: RewardConfig,
    services: Sequence[RewardSource] = (),
    own: Callable[..., Any] | None = None,
    local_models: Any = None,
) -> RewardComputationEngine:
    models = () if local_models is None else local_models.names
    function = None if own is None else RewardFunction("mine:own", own)
    plan = plan_rewards(options, services, models, function)
    pool = GraderPool([*plan.graders.values()], 2, options.reward_timeout_seconds) if plan.graders else None
    whole = replace(strategy.config, reward=options)
    return RewardComputationEngine(whole, strategy, plan, pool, local_models)


def samples_of(responses: Sequence[str], label: str = "a") -> list[Experience]:
    """One sample of each, of rows 10, 11, ..."""
    samples = [tiny_models.sample([3], [4], group=row) for row in range(len(responses))]
    return [
        replace(sample, response=response, example=replace(sample.example, row=10 + row, label=label))
        for row, (sample, response) in enumerate(zip(samples, responses, strict=True))
    ]


def outputs_of(engine: RewardComputationEngine, samples: Sequence[Experience]) -> list[RewardOutput]:
    try:
        engine.submit(samples)
        return engine.result()
    finally:
        engine.close()


def scores_of_two_steps() -> list[float | None]:
    lock = asyncio.Lock()

    async def score(response: str) -> float:
        async with lock:
            await asyncio.sleep(0)
        return 1.0

    with fsdp() as strategy:
        engine = engine_of(strategy, RewardConfig(), own=score)
        scores = []
        for _ in range(2):
            engine.submit([tiny_models.sample([3], [4], index=index) for index in range(2)])
            scores += [output.score for output in engine.result()]
    return scores


def test_what_an_async_reward_keeps_between_steps_stays_usable(two_ranks):
    """A lock that was waited for belongs to a loop, and raises under another."""
    assert two_ranks.run(scores_of_two_steps) == [[1.0] * 4] * 2


@pytest.fixture(scope="module")
def graders(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("graders") / "mine.py"
    path.write_text(GRADERS)
    return f"{path}:f"


def bad_rows_on_rank_1(reward_fn: str, reward_errors: str) -> tuple[list[RewardOutput] | str, float]:
    """Outputs, or what the error says, and seconds; rank 0 has good responses alone."""
    options = RewardConfig(reward_fn=reward_fn, reward_timeout_seconds=LIMIT, reward_errors=reward_errors)
    responses = ["good", *BAD] if os.environ["RANK"] == "1" else ["good"] * 3
    with fsdp() as strategy:
        engine = engine_of(strategy, options)
        engine.submit(samples_of(["good"] * 2))
        engine.result()
        start = time.monotonic()
        try:
            return outputs_of(engine, samples_of(responses)), time.monotonic() - start
        except PhaseError as error:
            return str(error), time.monotonic() - start


def test_rows_that_fail_are_left_out_or_score_the_ungradable_value_and_the_batch_ends_in_time(two_ranks, graders):
    """RWD-05, with --reward_errors exclude."""
    (good, seconds_0), (outputs, seconds_1) = two_ranks.run(bad_rows_on_rank_1, graders, "exclude")
    assert max(seconds_0, seconds_1) < 2 * LIMIT + SLACK
    fine = RewardOutput(1.0, {"length": 4.0})
    assert good == [fine] * 3 and outputs[0] == fine
    scores = dict(zip(BAD, [output.score for output in outputs[1:]], strict=True))
    assert scores == {"hang": 0.0, "allocate": 0.0} | dict.fromkeys(("recurse", "raise", "nan", "text", "die"))
    for row, output in enumerate(outputs[1:], start=11):
        assert f"row {row}" in output.faults["f"].message


def test_rows_that_fail_stop_all_ranks_with_their_rows_and_tracebacks(two_ranks, graders):
    """RWD-05, with --reward_errors stop."""
    for message, seconds in two_ranks.run(bad_rows_on_rank_1, graders, "stop"):
        assert seconds < 2 * LIMIT + SLACK
        assert message.startswith("rewards failed on rank 1 of 2.")
        assert "5 faults in the rewards of 8 responses\nrow 12, f: " in message
        assert "RecursionError: maximum recursion depth exceeded\nrow 14, f: " in message
        assert "KeyError: 'theirs'\nrow 15, f: " in message and "returned nan (float) for row 15" in message
        assert "and 2 more of other rows or kinds" in message


def all_hang(reward_fn: str) -> tuple[int, float]:
    """How many of 100 hanging rows the error counts, and its seconds."""
    options = RewardConfig(reward_fn=reward_fn, reward_timeout_seconds=LIMIT)
    with fsdp() as strategy:
        engine = engine_of(strategy, options)
        engine.submit(samples_of(["good"] * 2))
        engine.result()
        start = time.monotonic()
        with pytest.raises(PhaseError, match="rewards failed on ranks 0-1 of 2") as caught:
            outputs_of(engine, samples_of(["hang"] * 100))
        seconds = time.monotonic() - start
    assert "no time was left for it: the batch has had 1 s" in str(caught.value)
    return str(caught.value).count("96 faults in the rewards of 100 responses"), seconds


def test_a_hundred_rows_that_hang_at_once_end_all_ranks_at_the_deadline(two_ranks, graders):
    """RWD-05"""
    for count, seconds in two_ranks.run(all_hang, graders):
        assert count >= 1 and seconds < 2 * LIMIT + SLACK


def batch_faults(result: str, reward_errors: str) -> list[RewardOutput] | str:
    """Outputs of a batch function that returns, on rank 1, what is wrong, or what the error says."""

    def score(responses: list[str]) -> Any:
        if os.environ["RANK"] == "0":
            return [1.0] * len(responses)
        return {"count": [1.0], "nan": [1.0, math.nan], "text": "11", "raise": {}[0] if result == "raise" else 0}[
            result
        ]

    with fsdp() as strategy:
        engine = engine_of(strategy, RewardConfig(reward_errors=reward_errors), own=score)
        try:
            return outputs_of(engine, samples_of(["x", "y"]))
        except PhaseError as error:
            return str(error)


@pytest.mark.parametrize(
    ("result", "scores", "words"),
    [
        ("count", [None, None], "mine:own returned 1 for 2 responses."),
        ("nan", [1.0, None], "returned nan (float) for row 11."),
        ("text", [None, None], "mine:own returned str."),
        ("raise", [None, None], "KeyError: 0"),
    ],
)
def test_a_batch_function_that_fails_stops_all_ranks_or_leaves_rows_out(two_ranks, result, scores, words):
    """RWD-05"""
    for message in two_ranks.run(batch_faults, result, "stop"):
        assert message.startswith("rewards failed on rank 1 of 2.") and words in message
    rank_0, rank_1 = two_ranks.run(batch_faults, result, "exclude")
    assert [output.score for output in rank_0] == [1.0, 1.0]
    assert [output.score for output in rank_1] == scores
    assert all(words in output.faults["own"].message for output in rank_1 if output.score is None)


def hang_in_the_thread(kind: str) -> str:
    async def asynchronous(response: str) -> float:
        await asyncio.sleep(600)
        return 1.0

    def batch(responses: list[str]) -> list[float]:
        time.sleep(600)
        return []

    options = RewardConfig(reward_timeout_seconds=0.05, reward_errors="exclude")
    with fsdp() as strategy:
        engine = engine_of(strategy, options, own={"async": asynchronous, "batch": batch}[kind])
        with pytest.raises(PhaseError) as caught:
            outputs_of(engine, samples_of(["x", "y"]) if os.environ["RANK"] == "1" else [])
    return str(caught.value)


@pytest.mark.parametrize("kind", ["async", "batch"])
def test_a_function_that_hangs_in_the_thread_ends_the_run_by_name(two_ranks, kind):
    for message in two_ranks.run(hang_in_the_thread, kind, timeout=20):
        assert message.startswith("rewards failed on rank 1 of 2.")
        assert "mine:own has not ended after 1 s with its batch of 2 responses, 20 times --reward_timeo" in message


@pytest.mark.parametrize(("given", "ranks", "share"), [(5, "2", 2), (1, "8", 1), (6, None, 6)])
def test_each_rank_has_its_share_of_a_nodes_graders_and_at_least_one(monkeypatch, graders, given, ranks, share):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    options = RewardConfig(reward_fn=graders, reward_workers=given)
    pool = start_graders(replace(config(), reward=options), plan_rewards(options))
    assert pool is not None and pool.num_workers == share
    pool.close()
    assert start_graders(config(), plan_rewards(RewardConfig())) is None


class Meeting:
    """A service that answers a batch when all of them have been asked."""

    def __init__(self, name: str, all_asked: threading.Barrier) -> None:
        self.name = name
        self.all_asked = all_asked

    def check_row(self, sample: RewardInput) -> None: ...

    def grade(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Grade]:
        self.all_asked.wait(30)
        return [Grade(float(len(sample.response))) for sample in inputs]


class Models:
    """Local models that keep what they are asked for."""

    names = ("helpful", "safe")

    def __init__(self) -> None:
        self.asked: list[dict[str, list[int]]] = []

    def grade(self, samples: Sequence[Experience], rows: Mapping[str, Sequence[int]]) -> dict[str, list[Grade]]:
        self.asked.append({name: [*rows[name]] for name in self.names})
        fault = Fault("error", "too long for it")
        return {
            "helpful": [Grade(0.25) for _ in rows["helpful"]],
            "safe": [Grade(None, fault=fault) for _ in rows["safe"]],
        }


def rewards_from_everywhere(reward_fn: str) -> tuple[list[RewardOutput], list[RewardOutput], list[Any]]:
    recipe = f"{{a: {{judge: 0.5, remote_rm: 0.5, helpful: 2, {reward_fn}: 10}}, b: {{safe: 1, exact_match: 1}}}}"
    options = RewardConfig(reward_recipe=recipe, reward_errors="exclude")
    models, all_asked = Models(), threading.Barrier(2)
    services = [Meeting(name, all_asked) for name in ("judge", "remote_rm")]
    with fsdp() as strategy:
        engine = engine_of(strategy, options, services, local_models=models)
        engine.submit([*samples_of(["xyz", "x"], "a"), *samples_of(["b"], "b")])
        outputs = engine.result()
        nothing = outputs_of(engine, [])
    return outputs, nothing, models.asked


def test_components_of_every_kind_add_up_by_the_rows_label_and_are_waited_for_together(two_ranks, graders):
    """A service answers only when the other is asked too; local models are asked on every rank, also for nothing."""
    for outputs, nothing, asked in two_ranks.run(rewards_from_everywhere, graders):
        # 0.5 x 3 + 0.5 x 3 + 2 x 0.25 + 10 x 1, and 0.5 x 1 + 0.5 x 1 + 2 x 0.25 + 10 x 1.
        assert [output.score for output in outputs] == [13.5, 11.5, None]
        assert outputs[0].components == {"judge": 3.0, "remote_rm": 3.0, "helpful": 0.25, "f": 1.0, "f/length": 3.0}
        assert outputs[2].components == {"exact_match": 1.0, "exact_match/accuracy": 1.0}
        assert outputs[2].faults == {"safe": Fault("error", "too long for it")}
        assert nothing == []
        assert asked == [{"helpful": [0, 1], "safe": [2]}, {"helpful": [], "safe": []}]
