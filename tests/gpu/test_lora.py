"""Adapters on a GPU: fp32 beside bf16 in FSDP2's groups, the reference inside the actor, merged weights in the engine.

Without a GPU the same runs are in tests/distributed/test_lora.py.
"""

import json
import os
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightrft.models.actor import Actor
from lightrft.models.collate import collate
from lightrft.models.loading import load_config, with_adapter
from tests import tiny_models
from tests.distributed.runs import fsdp, save_task
from tests.distributed.torchrun import torchrun
from tests.tiny_models import random_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LORA = {"lora_rank": 8, "lora_alpha": 16, "bf16": True, "gradient_checkpointing": True}
TRAIN = Path(__file__).parents[2] / "examples/gsm8k_geo3k/train_colocate.py"
FLAGS = shlex.split(
    "--lora_rank 8 --lora_alpha 16 --bf16 --gradient_checkpointing --advantage_estimator group_norm --init_kl_coef "
    "0.01 --rollout_batch_size 4 --n_samples_per_prompt 4 --train_batch_size 16 --micro_train_batch_size 4 "
    "--prompt_max_len 8 --generate_max_len 32 --max_steps 4 --num_episodes 2 --lr_warmup_steps 0 --lr_scheduler "
    "constant --actor_learning_rate 5e-3 --reward_fn contains_answer --engine_mem_util 0.2 --weight_check full"
)
BACKENDS = {"fsdp": ["--fsdp"], "zero2": ["--zero_stage", "2"], "zero3": ["--zero_stage", "3"]}
MISSING = [package for package in ("deepspeed", "vllm") if find_spec(package) is None]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(package in MISSING, reason=f"needs {package}")


@pytest.fixture
def task(tmp_path) -> Path:
    """A model that vLLM's kernels take: heads of 64."""
    save_task(tmp_path)
    tiny_models.save_model(
        tmp_path / "model",
        tiny_models.qwen2(hidden_size=256, intermediate_size=512, num_hidden_layers=4, max_position_embeddings=256),
    )
    return tmp_path


@pytest.mark.parametrize(
    ("backend", "engine"),
    [
        ("fsdp", "torch"),
        pytest.param("zero2", "torch", marks=needs("deepspeed")),
        pytest.param("zero3", "torch", marks=needs("deepspeed")),
        pytest.param("fsdp", "vllm", marks=needs("vllm")),
        pytest.param("zero3", "vllm", marks=[needs("deepspeed"), needs("vllm")]),
    ],
)
def test_a_run_with_an_adapter_starts_on_policy_and_follows_its_engine(task, tmp_path, backend, engine):
    """NUM-17, WGT-05: KL to the reference and to the old policy are 0, every weight of the engine is checked.

    The engine's weights are W + s B A rounded to bf16, the actor multiplies by W and by B A apart: once the adapter is
    not 0 the two round differently, and log-probs differ twice as much as those of a model without one.
    """
    run = tmp_path / "run"
    paths = ["--pretrain", str(task / "model"), "--prompt_data", str(task / "prompts.jsonl"), "--save_path", str(run)]
    ended = torchrun(
        TRAIN,
        *FLAGS,
        *BACKENDS[backend],
        *paths,
        *["--engine_type", engine],
        *(["--enforce_eager"] if engine == "vllm" else []),
        env={"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]},
        launch=("--standalone", "--nproc_per_node=1"),
        timeout=150,
    )
    assert ended.returncode == 0 and ended.left == [], ended.output[-8000:]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    print(backend, engine, [round(line["rollout/log_prob_mismatch"], 4) for line in lines[1:]])
    assert lines[1]["kl/reference"] == lines[1]["train/ppo_kl"] == 0.0
    assert lines[1]["rollout/log_prob_mismatch"] <= 0.02
    assert all(line["rollout/log_prob_mismatch"] <= 0.04 for line in lines[2:])
    assert lines[4]["kl/reference"] != 0.0


def test_an_adapter_costs_the_frozen_weights_and_little_more(tmp_path):
    """bf16 weights of 2 bytes; those that learn, in fp32, and their gradients and Adam's state are of the adapter."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
    folder = tiny_models.save_model(tmp_path, tiny_models.qwen2(**sizes))
    with fsdp(folder, model=LORA) as strategy:
        before = torch.cuda.memory_allocated()
        loaded = with_adapter(load_config(folder, "auto"), strategy.config)
        model = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=True)
        role = strategy.prepare_optimizer("actor", model, 1e-4, 10)
        loss = -role.model(collate(random_samples(4), loaded.layout, strategy.device), 1.0).log_probs.mean()
        strategy.backward(loss, role, is_last=True)
        assert not strategy.optimizer_step(role, loss.detach()).skipped
        learned = sum(p.numel() for p in role.model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in role.model.parameters()) - learned
        assert learned < frozen / 50
        assert torch.cuda.memory_allocated() - before < 2.1 * frozen + 16 * learned
