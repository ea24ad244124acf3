"""SGLang's adapter on two ranks: one model over both (TP 2), and a model each. SGLang is itself where installed."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightrft.models.actor import Actor
from lightrft.models.loading import load_config
from lightrft.models.lora import sent_weights
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.collectives import PhaseError
from lightrft.types import GenerationOutput, PromptExample, SamplingParams, WeightBucket
from tests import tiny_models
from tests.distributed.ranks import Ranks
from tests.distributed.runs import fsdp
from tests.sglang.calls import wait_until_gone
from tests.sglang.engines import IS_REAL, ON_GPU, SLEEP_LEVEL, use_sglang
from tests.strategy.engine_conformance import full_log_probs, prompts

pytestmark = pytest.mark.skipif(ON_GPU, reason="ranks of tests have no GPUs")
START_SECONDS = 400
SAMPLED = SamplingParams(max_new_tokens=8)
SGLANG = {
    "engine_type": "sglang",
    "engine_mem_util": 0.5,
    "generate_max_len": 16,
    "weight_check": "full",
    "enable_engine_sleep": SLEEP_LEVEL is not None,
}


def the_model() -> PreTrainedModel:
    return tiny_models.random_model(tiny_models.qwen2(eos_token_id=1, tie_word_embeddings=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    the_model().save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def strategy_with_engine(
    folder: str, tp_size: int, prompt_max_len: int = 32, tokenizer: PreTrainedTokenizerBase | None = None
) -> Iterator[tuple[StrategyBase, Actor]]:
    use_sglang()
    if tp_size == 2:
        # SGLang would have a node of cores for each shard.
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    rollout = SGLANG | {"engine_tp_size": tp_size}
    patience = {"dist_timeout_seconds": 300.0}
    with fsdp(folder, rollout=rollout, data={"prompt_max_len": prompt_max_len}, strategy=patience) as strategy:
        strategy.create_engine(tokenizer or tiny_models.tokenizer())
        actor = strategy.prepare_model(load_config(folder, "auto"), "causal_lm", Actor, trainable=True)
        yield strategy, actor
        strategy.engine.engine.close()


def own_prompts(rank: int) -> list[PromptExample]:
    return prompts(3, 5, 9) if rank == 0 else prompts(2, 4, 6, 8, 10)


def generate_own_prompts(strategy: StrategyBase) -> list[list[GenerationOutput]]:
    own = own_prompts(strategy.rank)
    seeds = [[100 * strategy.rank + 10 * i + j for j in range(2)] for i in range(len(own))]
    return strategy.gather_and_generate(own, SAMPLED, seeds)


@torch.no_grad()
def sync_that_fails_on_rank_1(strategy: StrategyBase, actor: Actor) -> str:
    """One weight is of another shape there."""
    weights = sent_weights(actor.model)
    specs = strategy.weight_specs(weights, torch.float32)

    def buckets(indices: Sequence[int]) -> Iterator[WeightBucket]:
        for bucket in strategy.weight_buckets(weights, torch.float32, indices):
            yield [(name, weight[1:] if strategy.rank == 1 else weight) for name, weight in bucket]

    with pytest.raises(PhaseError) as error:
        strategy._broadcast_manager.broadcast_to_engine(specs, buckets, 9)
    return str(error.value)


def killed_at(tp_size: int, strategy: StrategyBase, actor: Actor) -> tuple[str, float]:
    """How the first scheduler's end is told, and after how many seconds: in a generation, or as weights are opened."""
    if strategy.rank == 0:
        pid = strategy.engine.engine.pids[0]
        if tp_size == 2:
            os.kill(pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    strategy.collectives.barrier()
    started = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        while True:
            if tp_size == 2:
                strategy.update_engine_weights(actor)
            generate_own_prompts(strategy)
    return str(error.value), time.monotonic() - started


def check_a_layout(folder: str, tp_size: int) -> dict[str, Any]:
    """A sync that fails; two rounds of sync, rollout and sleep; what is too long; then the end of a scheduler."""
    with strategy_with_engine(folder, tp_size) as (strategy, actor):
        engine = strategy.engine.engine
        found: dict[str, Any] = {"pids": engine.pids, "verified": []}
        found["failed"] = sync_that_fails_on_rank_1(strategy, actor)
        for _ in range(2):
            found["verified"].append(strategy.update_engine_weights(actor).num_verified)
            found["outputs"] = generate_own_prompts(strategy)
            strategy.sleep_engine()
        with pytest.raises(PhaseError) as error:
            strategy.gather_and_generate(prompts(45), SAMPLED, [[0]])
        found["too long"] = str(error.value)
        found["killed"] = killed_at(tp_size, strategy, actor)
    return found


@pytest.mark.parametrize("tp_size", [1, 2])
def test_two_ranks_share_an_engine_or_have_one_each(folder: Path, tp_size: int) -> None:
    """DIST-06, WGT-01: every rank checks the shard on its own device. One start for everything."""
    ranks = Ranks(world_size=2)
    try:
        results = ranks.run(check_a_layout, str(folder), tp_size, timeout=START_SECONDS)
    finally:
        ranks.close()
    num_weights = len(dict(the_model().named_parameters()))
    for rank, found in enumerate(results):
        assert "weight sync failed on rank 1 of 2." in found["failed"]
        assert found["verified"] == [num_weights] * 2
        check_outputs(own_prompts(rank), found["outputs"])
        assert "45 + 8 tokens, context 48" in found["too long"]
        message, seconds = found["killed"]
        assert f"pid {results[0]['pids'][0]}) has ended with exit code -9" in message and seconds < 10
    same = [found["pids"] == results[0]["pids"] for found in results]
    # SGLang itself has a process beside its schedulers.
    assert same == [True, tp_size == 2] and len(results[0]["pids"]) == tp_size + IS_REAL
    assert wait_until_gone([pid for found in results for pid in found["pids"]]) == []


def check_outputs(examples: list[PromptExample], outputs: list[list[GenerationOutput]]) -> None:
    assert [len(group) for group in outputs] == [2] * len(examples)
    for example, group in zip(examples, outputs, strict=True):
        for output in group:
            expected = full_log_probs(the_model(), example.prompt_ids, output.response_ids, 1.0)
            assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=1e-4)
            assert output.weight_version == 2
