"""Models that take media on a GPU: flash attention beside their towers, and whole steps in bf16."""

import pytest
import torch

from lightrft.models.actor import Actor
from lightrft.models.collate import Layout, collate
from lightrft.models.loading import load_config
from lightrft.trainer import build_trainer
from tests import tiny_media_models as tiny
from tests.distributed.runs import BACKENDS, fsdp
from tests.distributed.test_media_learning import RUNS, media_config, mixed_task, steps_of
from tests.models.test_multimodal import FAMILIES, samples_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_padded_agree_with_fp32_in_bf16(tmp_path, family):
    folder = tiny.save_model(tmp_path, family)
    samples = samples_of(family)
    results = {}
    ways: list[tuple[Layout, bool]] = [("packed", True), ("padded", True), ("padded", False)]
    for packing, bf16 in ways:
        with fsdp(folder, model={"bf16": bf16}) as strategy, torch.no_grad():
            actor = strategy.prepare_model(load_config(folder, packing), "causal_lm", Actor, trainable=True)
            results[packing, bf16] = actor(collate(samples, packing, strategy.device), 1.0).log_probs
    expected = results.pop(("padded", False))
    # Logits of these models are of the order of 10, of which bf16 keeps 8 bits.
    assert all((got - expected).abs().mean() < 0.1 for got in results.values())
    assert (results["packed", True] - results["padded", True]).abs().mean() < 0.1


@pytest.mark.parametrize("backend", ["fsdp", "zero2", "zero3"])
@pytest.mark.parametrize("family", RUNS)
def test_steps_on_images_and_sounds_in_bf16(tmp_path, family, backend):
    """Rows with and without media, through the torch engine."""
    task = mixed_task(tmp_path / "task", family)
    config = media_config(
        task,
        tmp_path / "run",
        2,
        model={"bf16": True, "gradient_checkpointing": True},
        strategy=BACKENDS[backend] | {"adam_offload": True},
        rollout={"generate_max_len": 6, "rollout_batch_size": 4, "n_samples_per_prompt": 4},
        train={"train_batch_size": 16, "micro_train_batch_size": 4},
        algorithm={"init_kl_coef": 0.01},
        reward={"reward_fn": f"{task / 'reward.py'}:letters"},
    )
    build_trainer(config).fit()
    for line in steps_of(config):
        assert line["rollout/log_prob_mismatch"] < 0.03
        assert line["train/grad_norm"] > 0
