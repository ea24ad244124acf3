"""Runs on images and sounds learn to look and to listen; their checkpoints go on, and their exports load alone."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoProcessor

from lightrft.config import Config
from lightrft.models.actor import Actor
from lightrft.models.collate import collate
from lightrft.trainer import build_trainer
from lightrft.trainer.export import export_checkpoint
from tests import tiny_media
from tests import tiny_media_models as tiny
from tests.distributed.resumed_runs import assert_same, run
from tests.distributed.runs import BACKENDS, make_config, read

COLOURS = {"r": (230, 20, 20), "g": (20, 230, 20), "b": (20, 20, 230)}
TONES = {"l": 300.0, "h": 3000.0}
RATE = 16_000


def save_images(folder: Path) -> list[dict]:
    """Images of one colour each, of two sizes; the label is the colour's first letter."""
    rows = []
    for i in range(12):
        label = "rgb"[i % 3]
        Image.new("RGB", (16 + 8 * (i % 4 // 2), 16), COLOURS[label]).save(folder / f"{i}.png")
        rows.append({"input": "colour?", "label": label, "images": [f"{i}.png"]})
    return rows


def save_sounds(folder: Path) -> list[dict]:
    """Low and high tones of three lengths."""
    rows = []
    for i in range(12):
        label = "lh"[i % 2]
        time = np.arange(int(RATE * (0.3 + 0.1 * (i % 3)))) / RATE
        soundfile.write(folder / f"{i}.wav", 0.5 * np.sin(2 * np.pi * TONES[label] * time), RATE)
        rows.append({"input": "tone?", "label": label, "audios": f"{i}.wav"})
    return rows


def teach(folder: Path, family: str, letters: str, prompt: str) -> None:
    """A model that answers a prompt with one of the letters, without a look at what it is about."""
    tiny_media.save_model(folder, family)
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    kind, size = ("audio", (4,)) if family == "qwen2_audio" else ("image", (4, 4))
    for step in range(60):
        # New noise each time: there is nothing to learn from it.
        items = [tiny.item(family, kind, 12 * step + i, size) for i in range(12)]
        samples = [
            tiny.sample(family, [item], letters[i % len(letters)], prompt=prompt) for i, item in enumerate(items)
        ]
        loss = -Actor(model)(collate(samples, "padded"), 1.0).log_probs.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def task_of(folder: Path, family: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = save_sounds(folder) if family == "qwen2_audio" else save_images(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    teach(folder / "model", family, "lh" if family == "qwen2_audio" else "rgb", rows[0]["input"])
    return folder


def media_config(task: Path, save_path: Path, steps: int, **owners: dict) -> Config:
    changes: dict[str, dict] = {
        "rollout": {"rollout_batch_size": 6, "n_samples_per_prompt": 8, "generate_max_len": 1},
        "train": {"train_batch_size": 48, "micro_train_batch_size": 8, "max_steps": steps, "num_episodes": 100},
        "optimizer": {"actor_learning_rate": 2e-3},
        "data": {"prompt_max_len": 64, "media_workers": 0},
    }
    for owner, change in owners.items():
        changes[owner] = changes.get(owner, {}) | change
    return make_config(task, save_path, **changes)


def steps_of(config: Config) -> list[dict]:
    return [line for line in read(config, "metrics.jsonl") if line["step"] > 0]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_audio"])
def test_grpo_on_media_raises_the_reward_on_two_ranks(two_ranks, tmp_path, family):
    """A model that does not look is right once in three colours, or two tones."""
    config = media_config(task_of(tmp_path / "task", family), tmp_path / "run", steps=32)
    assert two_ranks.run(run, config, timeout=300) == [0, 0]
    lines = steps_of(config)
    rewards = [line["reward/mean"] for line in lines]
    assert np.mean(rewards[:4]) < 0.65, rewards
    assert np.mean(rewards[-4:]) > 0.9, rewards
    assert max(line["rollout/log_prob_mismatch"] for line in lines) < 1e-4


def mixed_task(folder: Path, family: str) -> Path:
    """Eight rows, every second of text alone."""
    folder.mkdir()
    rows = (save_sounds if family == "qwen2_audio" else save_images)(folder)[:8]
    mixed = [{"input": row["input"], "label": row["label"]} if i % 2 else row for i, row in enumerate(rows)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    (folder / "reward.py").write_text("def letters(response):\n    return sum(c.isalpha() for c in response)\n")
    tiny_media.save_model(folder / "model", family)
    return folder


# By family: the backend, and what the run has besides.
RUNS = {
    "qwen2_5_vl": ("fsdp", {"algorithm": {"advantage_estimator": "gae", "init_kl_coef": 0.01}}),
    "qwen2_vl": ("zero2", {"algorithm": {"init_kl_coef": 0.01}}),
    "qwen3_vl": ("zero3", {"model": {"freeze_prefix": ("visual",)}}),
    "internvl": ("fsdp", {"model": {"lora_rank": 2}, "algorithm": {"init_kl_coef": 0.01}}),
    "qwen2_audio": ("fsdp", {"model": {"gradient_checkpointing": True}, "algorithm": {"init_kl_coef": 0.01}}),
}


def weights_after(config: Config) -> dict[str, torch.Tensor]:
    """The live actor's after a run."""
    trainer = build_trainer(config)
    trainer.fit()
    return {name: tensor.clone() for name, tensor in trainer.strategy.named_weights(trainer.actor.model, torch.float32)}


@pytest.mark.parametrize("family", RUNS)
def test_a_run_with_media_on_some_ranks_goes_on_as_an_unbroken_one_and_exports(two_ranks, tmp_path, family):
    """DIST-02, CKPT-03, CKPT-06: the exported folder gives the live actor's weights by the model's class alone."""
    task = mixed_task(tmp_path / "task", family)
    backend, changes = RUNS[family]
    owners = {**changes, "strategy": BACKENDS[backend], "reward": {"reward_fn": f"{task / 'reward.py'}:letters"}}
    owners["rollout"] = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "generate_max_len": 6}
    owners["train"] = {"train_batch_size": 8, "micro_train_batch_size": 2, "num_episodes": 2}
    configs = {
        name: media_config(task, tmp_path / name, 4, checkpoint={"ckpt_path": str(tmp_path / name / "ckpt")}, **owners)
        for name in ("whole", "stopped")
    }
    live, _ = two_ranks.run(weights_after, configs["whole"], timeout=200)
    assert two_ranks.run(run, configs["stopped"], 2, timeout=200) != [0, 0]
    goes_on = replace(configs["stopped"], checkpoint=replace(configs["stopped"].checkpoint, load_checkpoint=True))
    assert two_ranks.run(run, goes_on, timeout=200) == [0, 0]
    assert_same(configs["stopped"], configs["whole"], tolerance=1e-6)
    assert min(line["train/grad_norm"] for line in steps_of(configs["whole"])) > 0

    export_checkpoint(tmp_path / "whole" / "ckpt", tmp_path / "hf")
    assert type(AutoProcessor.from_pretrained(tmp_path / "hf")) is type(tiny_media.PROCESSORS[family]())
    exported = dict(AutoModelForMultimodalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).named_parameters())
    assert exported.keys() == live.keys()
    assert all(torch.allclose(exported[name], live[name], atol=1e-6) for name in live)
