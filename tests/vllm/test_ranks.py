"""vLLM on two ranks: one model over both (TP 2), and a model each (TP 1)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from lightrft.config import Config
from lightrft.models.actor import Actor
from lightrft.models.loading import load_config
from lightrft.strategy.engine import ManagedEngine
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.collectives import PhaseError
from lightrft.strategy.utils.watch import GROUP_TIMEOUT_GRACE_SECONDS
from lightrft.strategy.vllm_utils import vllm_engine
from lightrft.trainer import build_trainer
from lightrft.types import GenerationOutput, PromptExample, SamplingParams, WeightBucket, WeightSpec
from tests import tiny_models
from tests.distributed.ranks import Ranks
from tests.distributed.runs import fsdp, make_config, read
from tests.strategy.engine_conformance import full_log_probs, prompts
from tests.vllm.engines import start_vllm
from tests.wide_models import wide_qwen2

START_SECONDS = 280
"""vLLM starts within it on a busy machine."""
VLLM = {"engine_type": "vllm", "enable_engine_sleep": False, "enforce_eager": True, "engine_mem_util": 0.1}
SAMPLED = SamplingParams(max_new_tokens=8)
LAYER = "model.layers.1."
QKV, BIAS, GATE_UP = (
    LAYER + name for name in ("self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias", "mlp.gate_up_proj.weight")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied Qwen2 with 4 heads of 32 numbers, 2 of keys and values, and biases; and prompts."""
    folder = tmp_path_factory.mktemp("qwen2")
    the_model().save_pretrained(folder / "model")
    tiny_models.tokenizer().save_pretrained(folder / "model")
    rows = [{"input": f"{a}+{b}=", "label": str(b)} for a in range(4) for b in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@contextmanager
def fresh_ranks() -> Iterator[Ranks]:
    """Two new processes: the size of vLLM's groups is a process's for good."""
    ranks = Ranks(world_size=2)
    try:
        yield ranks
    finally:
        ranks.close()
        # vLLM for CPUs names its shared memory alike in every run, and a process that is killed leaves it.
        for leftover in Path("/dev/shm").glob("*-cpushm_*"):
            leftover.unlink()


def check_a_group_of_two(folder: str) -> dict[str, Any]:
    """Everything on one start of vLLM with TP 2."""
    start_vllm()
    found: dict[str, Any] = {}
    rollout = VLLM | {"engine_tp_size": 2, "generate_max_len": 16}
    patience = {"dist_timeout_seconds": 120.0}
    with fsdp(folder, rollout=rollout, data={"prompt_max_len": 32}, strategy=patience) as strategy:
        actor = strategy.prepare_model(load_config(folder, "auto"), "causal_lm", Actor, trainable=True)
        with mock.patch.object(vllm_engine, "compilation_config", lambda: {"cudagraph_num_of_warmups": 3}):
            engine = strategy.create_engine(tiny_models.tokenizer())
        found["warmups"] = engine.engine.llm.llm_engine.vllm_config.compilation_config.cudagraph_num_of_warmups
        strategy.update_engine_weights(actor)
        found["outputs"] = generate_own_prompts(strategy)
        found["error"] = generate_too_long(strategy)
        weights = [(name, numbered(name, parameter)) for name, parameter in the_model().named_parameters()]
        found["fused"] = fused_rows(engine, weights)
        if strategy.rank == 1:
            # Its last row of keys and values belongs to v.
            dict(engine.engine.model.named_parameters())[QKV][-1, 5] += 1
        found["changed"] = engine.verify_weights(weights)
        found["bytes"] = engine.device_bytes()
        found["timeouts"] = group_timeouts()
    return found


def group_timeouts() -> list[float]:
    """Seconds that each process group of this rank waits."""
    backends = [group._get_backend(torch.device("cpu")) for group in dist.distributed_c10d._world.pg_map]
    return [backend.options._timeout.total_seconds() for backend in backends]


def the_model() -> PreTrainedModel:
    return wide_qwen2(eos_token_id=1, tie_word_embeddings=False)


def own_prompts(rank: int) -> list[PromptExample]:
    return prompts(3, 5, 9) if rank == 0 else prompts(2, 4, 6, 8, 10)


def generate_own_prompts(strategy: StrategyBase) -> list[list[GenerationOutput]]:
    """Four samples each."""
    own = own_prompts(strategy.rank)
    seeds = [[100 * strategy.rank + 10 * i + j for j in range(4)] for i in range(len(own))]
    return strategy.gather_and_generate(own, SAMPLED, seeds)


def generate_too_long(strategy: StrategyBase) -> str:
    with pytest.raises(PhaseError) as error:
        strategy.gather_and_generate(prompts(45), SAMPLED, [[0]])
    return str(error.value)


def numbered(name: str, weight: Tensor) -> Tensor:
    """Every number says its row and of which part it is: 1000 x part + row, for q, k, v, gate and up."""
    part = next((i for i, part in enumerate(("q_", "k_", "v_", "gate_", "up_"), start=1) if f".{part}proj" in name), 0)
    rows = torch.arange(len(weight), dtype=torch.float32) + 1000 * part
    return rows.view(-1, *[1] * (weight.ndim - 1)).expand(weight.shape).contiguous()


def fused_rows(engine: ManagedEngine, weights: WeightBucket) -> dict[str, list[float]]:
    """First column of a layer's fused parameters after a sync."""
    engine.begin_weight_update([WeightSpec(name, tuple(weight.shape), weight.dtype) for name, weight in weights])
    engine.update_weights(weights)
    engine.finish_weight_update(7)
    parameters = dict(engine.engine.model.named_parameters())
    return {name: parameters[name].reshape(len(parameters[name]), -1)[:, 0].tolist() for name in (QKV, BIAS, GATE_UP)}


def test_one_model_over_two_ranks(folder: Path) -> None:
    with fresh_ranks() as ranks:
        results = ranks.run(check_a_group_of_two, str(folder / "model"), timeout=START_SECONDS)
    for rank, found in enumerate(results):
        check_outputs(own_prompts(rank), found["outputs"])
        assert found["warmups"] == 3
        assert "45 + 8 tokens, context 48" in found["error"]
        check_fused(rank, found["fused"])
    assert [found["changed"] for found in results] == [[], [f"{LAYER}self_attn.v_proj.weight"]]
    for found in results:
        assert found["bytes"]["weights"] < sum(parameter.nbytes for parameter in the_model().parameters())
        assert found["bytes"]["kv_cache"] > 0
        # DIST-07: of ours, for tensor and data parallelism, and of vLLM's own; the default group is the tests'.
        assert found["timeouts"].count(120.0 + GROUP_TIMEOUT_GRACE_SECONDS) == len(found["timeouts"]) - 1 > 2


def check_outputs(examples: list[PromptExample], outputs: list[list[GenerationOutput]]) -> None:
    """DIST-06, WGT-02: each rank gets its own prompts' results, and they are the whole model's."""
    assert [len(group) for group in outputs] == [4] * len(examples)
    for example, group in zip(examples, outputs, strict=True):
        assert len({tuple(output.response_ids) for output in group}) > 1
        for output in group:
            expected = full_log_probs(the_model(), example.prompt_ids, output.response_ids, 1.0)
            assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=1e-4)
            assert output.weight_version == 1


def check_fused(rank: int, fused: dict[str, list[float]]) -> None:
    """WGT-07. Rank r has heads 2r and 2r + 1 of q (64 rows), head r of k and of v (32 each), half of gate and of up."""
    q, k, v = (range(64 * rank, 64 * rank + 64), *[range(32 * rank, 32 * rank + 32)] * 2)
    qkv = [*(1000 + i for i in q), *(2000 + i for i in k), *(3000 + i for i in v)]
    half = range(48 * rank, 48 * rank + 48)
    assert fused[QKV] == fused[BIAS] == qkv
    assert fused[GATE_UP] == [*(4000 + i for i in half), *(5000 + i for i in half)]


def run(config: Config) -> list[dict[str, Any]]:
    """What metrics.jsonl holds after a run."""
    start_vllm()
    build_trainer(config).fit()
    return read(config, "metrics.jsonl")


RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "an adapter on FSDP2, a model on each rank": {
        "rollout": {"engine_tp_size": 1},
        "strategy": {"fsdp": True},
        "model": {"lora_rank": 4, "lora_alpha": 8},
    },
    "ZeRO-3, one model over both ranks": {
        "rollout": {"engine_tp_size": 2},
        "strategy": {"fsdp": False, "zero_stage": 3},
    },
}


def test_runs_of_every_layout_and_backend_draw_the_same_tokens_at_first(folder: Path) -> None:
    """DIST-03: keys belong to samples, and an adapter starts at 0. Every weight is verified at every sync."""
    drawn = []
    for name, owners in RUNS.items():
        rollout = VLLM | {"weight_check": "full"} | owners["rollout"]
        config = make_config(folder, folder / name, **owners | {"rollout": rollout})
        with fresh_ranks() as ranks:
            metrics = ranks.run(run, config, timeout=START_SECONDS)[0]
        assert [line["step"] for line in metrics if line["step"] > 0] == [1, 2]
        assert all(line["rollout/log_prob_mismatch"] < 1e-4 for line in metrics if line["step"] > 0)
        assert metrics[1]["train/grad_norm"] > 0
        drawn.append([row["response"] for row in read(config, "samples.jsonl") if row["step"] == 1])
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 4
