"""DeepSpeed on GPUs: the numbers of FSDP2, and memory that really moves."""

import pytest
import torch

from lightrft.models.actor import Actor
from lightrft.models.collate import collate
from lightrft.models.loading import load_config
from lightrft.strategy.roles import TrainedRole
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.devices import storage_bytes
from lightrft.trainer import build_trainer
from tests import tiny_models
from tests.distributed.runs import BACKENDS, make_config, read, save_task, strategy_on
from tests.distributed.test_backends import recorded_rollout, replayed
from tests.tiny_models import random_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STAGES = ["zero1", "zero2", "zero3"]
BOTH = [(stage, bf16) for stage in STAGES for bf16 in (False, True)]


def test_a_recorded_rollout_gives_the_same_losses_norms_and_weights_on_every_backend(tmp_path):
    folder, samples = tiny_models.save_model(tmp_path), recorded_rollout()
    expected, wanted = replayed("fsdp", folder, samples)
    for name in STAGES:
        results, weights = replayed(name, folder, samples)
        for got, want in zip(results, expected, strict=True):
            assert got == pytest.approx(want, abs=1e-4), name
        assert max((weights[key] - wanted[key]).abs().max().item() for key in wanted) < 1e-4, name


def on_device(strategy: StrategyBase, role: TrainedRole) -> tuple[int, int]:
    """Bytes of weights and of the optimizer."""
    held = strategy.device_bytes([role], {})
    return held["actor weights"], held["actor optimizer"]


@pytest.mark.parametrize(("backend", "bf16"), [pair for pair in BOTH if pair != ("zero1", True)])
def test_weights_and_optimizer_leave_the_device_apart_and_training_goes_on(tmp_path, backend, bf16):
    """MEM-03: nine tenths of each are free, in three cycles, and the loss falls."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
    folder = tiny_models.save_model(tmp_path, tiny_models.qwen2(**sizes))
    flags = {"model": {"bf16": bf16}, "optimizer": {"lr_warmup_steps": 0, "lr_scheduler": "constant"}}
    with strategy_on(backend, folder, **flags) as strategy:
        loaded = load_config(folder, "auto")
        model = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=True)
        role = strategy.prepare_optimizer("actor", model, 1e-4, 10)
        micro = collate(random_samples(4), loaded.layout, strategy.device)
        losses, left = [], []
        for _ in range(3):
            loss = -role.model(micro, 1.0).log_probs.mean()
            strategy.backward(loss, role, is_last=True)
            assert not strategy.optimizer_step(role, loss.detach()).skipped
            losses.append(loss.item())
            loss = None
            weights, optimizer = on_device(strategy, role)
            before = torch.cuda.memory_allocated()
            strategy.offload_optimizer(role)
            after_optimizer = torch.cuda.memory_allocated()
            assert before - after_optimizer > 0.9 * optimizer > 0
            strategy.offload_model(role.model)
            left.append(torch.cuda.memory_allocated())
            assert after_optimizer - left[-1] > 0.9 * weights > 0
            # A rotary embedding's own numbers stay.
            assert on_device(strategy, role) == (storage_bytes(role.model.buffers(), strategy.device), 0)
            strategy.reload_model(role.model)
            assert on_device(strategy, role) == (weights, 0)
            with torch.no_grad():
                role.model(micro, 1.0)
            strategy.load_optimizer(role)
        assert losses[2] < losses[1] < losses[0]
        assert left[2] == pytest.approx(left[1], rel=0.01)


@pytest.mark.parametrize(
    ("backend", "adam_offload"), [("zero1", False), ("zero2", True), ("zero3", False), ("zero3", True)]
)
def test_a_run_in_bf16_starts_with_ratios_of_one_and_matches_its_engine(tmp_path, backend, adam_offload):
    save_task(tmp_path)
    run = make_config(
        tmp_path,
        tmp_path / "run",
        model={"bf16": True, "gradient_checkpointing": True},
        algorithm={"advantage_estimator": "gae", "init_kl_coef": 0.01},
        strategy=BACKENDS[backend] | {"adam_offload": adam_offload},
    )
    build_trainer(run).fit()
    _, first, second = read(run, "metrics.jsonl")
    assert first["train/ppo_kl"] == 0.0 < first["train/grad_norm"]
    assert first["rollout/log_prob_mismatch"] < 0.02 and second["rollout/log_prob_mismatch"] < 0.02
