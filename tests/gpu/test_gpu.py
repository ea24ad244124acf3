"""What only a GPU can show: flash attention on packed rows, memory that really moves, bf16 parity."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lightrft.config import DataConfig
from lightrft.models.actor import Actor
from lightrft.models.attention import VARLEN, varlen_attention
from lightrft.models.collate import collate
from lightrft.models.loading import load_config
from lightrft.trainer import build_trainer
from tests import tiny_models
from tests.distributed.runs import config, fsdp
from tests.tiny_models import random_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class CausalModule(torch.nn.Module):
    is_causal = True


def test_flash_attention_on_a_packed_row_equals_each_sample_alone():
    torch.manual_seed(0)
    lengths = [7, 1, 120, 33]
    q = torch.randn(1, 8, sum(lengths), 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, 2, sum(lengths), 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    borders = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to("cuda", torch.int32)
    out, _ = varlen_attention(CausalModule(), q, k, v, None, cu_seq_lens_q=borders, max_length_q=max(lengths))
    out.float().square().sum().backward()
    parts = [
        F.scaled_dot_product_attention(a.float(), b.float(), c.float(), is_causal=True, enable_gqa=True)
        for a, b, c in zip(q.detach().split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
    ]
    expected = torch.cat(parts, 2).transpose(1, 2)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    assert torch.isfinite(q.grad).all()


def model_folder(tmp_path: Path) -> str:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
    return tiny_models.save_model(tmp_path / "model", tiny_models.qwen2(**sizes))


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_packed_and_padded_agree_in_bf16(tmp_path):
    samples = random_samples(16)
    results = {}
    for packing in ("packed", "padded"):
        folder = tiny_models.save_model(tmp_path / packing)
        with fsdp(folder, model={"bf16": True}) as strategy, torch.no_grad():
            loaded = load_config(folder, packing)
            assert loaded.attention == (VARLEN if packing == "packed" else "sdpa")
            actor = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=True)
            results[packing] = actor(collate(samples, packing, strategy.device), 1.0).log_probs
    assert (results["packed"] - results["padded"]).abs().mean() < 0.02


def test_a_sleeping_engine_gives_its_memory_back(tmp_path):
    folder = model_folder(tmp_path)
    with fsdp(folder, model={"bf16": True}) as strategy:
        actor = strategy.prepare_model(load_config(folder, "auto"), "causal_lm", Actor, trainable=True)
        before = torch.cuda.memory_allocated()
        engine = strategy.create_engine(tiny_models.tokenizer())
        strategy.update_engine_weights(actor)
        held = torch.cuda.memory_allocated() - before
        size = weight_bytes(engine.engine.model)
        assert held == pytest.approx(size, rel=0.05)
        engine.wake_up()
        strategy.sleep_engine()
        assert torch.cuda.memory_allocated() - before < 0.02 * size


def test_frozen_roles_and_optimizer_state_leave_the_device(tmp_path):
    """MEM-03: after offload every state tensor is on the host and 8 bytes a parameter are free."""
    folder = model_folder(tmp_path)
    with fsdp(folder, strategy={"adam_offload": True}) as strategy:
        loaded = load_config(folder, "auto")
        start = torch.cuda.memory_allocated()
        frozen = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=False)
        assert torch.cuda.memory_allocated() - start < 0.02 * weight_bytes(frozen)
        micro = collate(random_samples(4), loaded.layout, strategy.device)
        with strategy.on_device(frozen), torch.no_grad():
            assert torch.cuda.memory_allocated() - start > 0.9 * weight_bytes(frozen)
            frozen(micro, 1.0)
        assert torch.cuda.memory_allocated() - start < 0.02 * weight_bytes(frozen)

        actor = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=True)
        role = strategy.prepare_optimizer("actor", actor, 1e-4, 10)
        state_bytes = 2 * weight_bytes(actor)
        for _ in range(2):
            with strategy.optimizer_on_device(role):
                loss = -actor(micro, 1.0).log_probs.mean()
                strategy.backward(loss, role, is_last=True)
                assert not strategy.optimizer_step(role, loss.detach()).skipped
                inside = torch.cuda.memory_allocated()
            assert inside - torch.cuda.memory_allocated() > 0.9 * state_bytes
        tensors = [v for state in role.optimizer.state.values() for v in state.values() if v.ndim > 0]
        assert tensors and all(t.device.type == "cpu" for t in tensors)


@pytest.mark.parametrize("offload", [False, True])
def test_a_run_in_bf16_starts_with_ratios_of_one_and_matches_its_engine(tmp_path, offload):
    folder = tiny_models.save_model(tmp_path / "model", tiny_models.qwen2(hidden_size=256, num_hidden_layers=4))
    rows = [{"input": f"{a}+{b}=", "label": str(b)} for a in range(4) for b in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = config(
        folder,
        model={"bf16": True, "gradient_checkpointing": True},
        rollout={"rollout_batch_size": 8, "n_samples_per_prompt": 8, "generate_max_len": 32, "temperature": 0.8},
        train={
            "train_batch_size": 64,
            "micro_train_batch_size": 16,
            "max_steps": 2,
            "save_path": str(tmp_path / "run"),
        },
        algorithm={"advantage_estimator": "group_norm", "init_kl_coef": 0.01},
        optimizer={"actor_learning_rate": 1e-3, "lr_warmup_steps": 0},
        strategy={"fsdp_cpu_offload": offload},
        reward={"reward_fn": "contains_answer"},
    )
    data = DataConfig(prompt_data=str(tmp_path / "prompts.jsonl"), prompt_max_len=8)
    build_trainer(replace(run, data=data)).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["train/ppo_kl"] == 0.0
    assert lines[1]["train/grad_norm"] > 0
    assert lines[1]["rollout/log_prob_mismatch"] < 0.02
    assert lines[2]["rollout/log_prob_mismatch"] < 0.02
