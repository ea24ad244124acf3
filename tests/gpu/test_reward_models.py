"""What three reward models of one size take of a GPU while they score, and that nothing of them stays (MEM-06).

LIGHTRFT_TINY=1 runs the same on a CPU with tiny models, where the ledger has no peak to speak of.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.devices import storage_bytes
from lightrft.trainer.local_rewards import LocalRewardModels, load_reward_models
from lightrft.types import Experience
from lightrft.utils.memory_ledger import MemoryLedger, PhaseMemory, total
from tests import tiny_models
from tests.distributed.runs import strategy_on

TINY = os.environ.get("LIGHTRFT_TINY") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (TINY or torch.cuda.is_available()), reason="needs a CUDA device"),
]

GIB = 2**30
NAMES = ("helpful", "safe", "brief")
LENGTH = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random classifier on a trunk of the shape of Qwen2-1.5B."""
    shape = tiny_models.qwen2(max_position_embeddings=4096, num_labels=1)
    if not TINY:
        shape = tiny_models.qwen2(
            vocab_size=151_936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            num_labels=1,
        )
    path = tmp_path_factory.mktemp("classifier")
    with torch.device("cpu" if TINY else "cuda"):
        model = AutoModelForSequenceClassification.from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(path)
    tiny_models.tokenizer().save_pretrained(path)
    return str(path)


def samples() -> list[Experience]:
    made = [tiny_models.sample([5], [6], group=i) for i in range(16)]
    prompts = [str(i % 10) * LENGTH for i in range(len(made))]
    return [
        replace(s, example=replace(s.example, prompt=prompt), response="1")
        for s, prompt in zip(made, prompts, strict=True)
    ]


@contextmanager
def three_models(backend: str, folder: str) -> Iterator[tuple[LocalRewardModels, MemoryLedger]]:
    """Loaded from one folder, and each with weights of its own."""
    pretrain = json.dumps(dict.fromkeys(NAMES, folder))
    with strategy_on(backend, model={"bf16": True}, reward={"reward_pretrain": pretrain}) as strategy:
        ledger = MemoryLedger(strategy.device)
        models = LocalRewardModels(strategy.config, strategy, load_reward_models(strategy.config), ledger.observe)
        frozen = {f"reward {name}": model for name, model in models.models.items()}
        ledger.watch(lambda: strategy.device_bytes([], frozen))
        yield models, ledger


def reward_phase(models: LocalRewardModels, ledger: MemoryLedger) -> PhaseMemory:
    everything = samples()
    ledger.begin("reward", time.perf_counter())
    grades = models.grade(everything, {name: range(len(everything)) for name in models.names})
    ledger.end(time.perf_counter())
    assert all(grade.value is not None for of_model in grades.values() for grade in of_model)
    [record] = ledger.collect()
    return record


def on_device(strategy: StrategyBase, models: LocalRewardModels) -> int:
    tensors = [tensor for model in models.models.values() for tensor in strategy.model_tensors(model)]
    return storage_bytes(tensors, torch.device("cuda"))


def fails_in_a_forward(models: LocalRewardModels) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("in a forward")

    models.models["safe"].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in a forward"):
        models.grade(samples(), {name: [0, 1] for name in models.names})


@pytest.mark.parametrize(("backend", "most"), [("fsdp", 0.5), ("zero3", 1.0)])
def test_three_models_take_three_times_their_size_or_once_and_leave_the_device_empty(folder, backend, most):
    """MEM-06. `most` is what a forward may take beside the weights, in sizes of a model.

    FSDP2 gathers the embedding and three layers; ZeRO-3 holds no model, and gathers up to a billion weights.
    """
    if backend != "fsdp" and find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    with three_models(backend, folder) as (models, ledger):
        strategy = models.strategy
        size = 2 * sum(math.prod(strategy.full_shape(weight)) for weight in models.models["safe"].parameters())
        assert TINY or size > 3e9
        for all_at_once, count in ((True, 3), (False, 1)):
            models.all_at_once = all_at_once
            record = reward_phase(models, ledger)
            taken = (total(record.peak) - total(record.entry)) / size
            parts = ", ".join(f"{name} {held / GIB:.2f}" for name, held in record.peak.items())
            print(f"{backend}, {count} at a time: {taken:.2f} x {size / GIB:.2f} GiB, {record.seconds:.1f} s; {parts}")
            if not TINY:
                resident = 0 if backend == "zero3" else count
                assert resident <= taken <= resident + most
                assert on_device(strategy, models) < 0.01 * size
                assert total(record.exit) - total(record.entry) < 0.2 * size
        fails_in_a_forward(models)
        assert on_device(strategy, models) < 0.01 * size
