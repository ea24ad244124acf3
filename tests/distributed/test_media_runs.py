"""Whole runs of models that take media, on two ranks."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForMultimodalLM, AutoProcessor, Qwen2_5_VLProcessor

from lightrft.config import Config
from lightrft.trainer import build_trainer
from lightrft.trainer.export import export_checkpoint
from lightrft.trainer.setup import check_inputs
from tests import tiny_media
from tests.datasets.media_samples import image, save_tone, save_video
from tests.distributed.runs import make_config, read

COUNTS = [1, 3, 0, 2, 1, 0, 2, 1]
"""Images of each row."""
REWARD = """
from pathlib import Path

def count(response, media):
    paths = media.get("image", [])
    assert all(Path(path).is_file() for path in paths)
    return len(paths) + min(len(response), 9) / 10
"""


@pytest.fixture(scope="module")
def media_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media_task")
    tiny_media.save_model(folder / "model", "qwen2_5_vl")
    rows = []
    for i, count in enumerate(COUNTS):
        names = [f"{i}_{j}.png" for j in range(count)]
        for j, name in enumerate(names):
            image(16 + 8 * j, 24, seed=10 * i + j).save(folder / name)
        rows.append({"input": "<image>" * count + f"{i}?", "label": str(i), "images": names})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def media_config(task: Path, save_path: Path, **owners: dict) -> Config:
    data = {"apply_chat_template": True, "prompt_max_len": 256, "media_workers": 0}
    owners["data"] = data | owners.get("data", {})
    return make_config(task, save_path, **owners)


def run(config: Config) -> None:
    build_trainer(config).fit()


def mistake(config: Config) -> str:
    """What a run says that ends before it begins."""
    try:
        check_inputs(config)
    except ValueError as error:
        return str(error)
    return "there was none"


def test_a_run_with_images_trains_evaluates_goes_on_and_exports_its_processor(two_ranks, media_task, tmp_path):
    """DATA-06, CKPT-06: rows with 0 to 3 images, of which a rank may have none; the reward counts them."""
    (tmp_path / "reward.py").write_text(REWARD)
    owners = {
        "data": {"eval_data": str(media_task / "prompts.jsonl")},
        "checkpoint": {"ckpt_path": str(tmp_path / "ckpt"), "load_checkpoint": True},
        "reward": {"reward_fn": f"{tmp_path}/reward.py:count"},
    }
    for max_steps in (1, 2):
        # First by processes, then by the ranks themselves.
        owners["data"]["media_workers"] = 2 if max_steps == 1 else 0
        config = media_config(media_task, tmp_path / "run", **owners, train={"max_steps": max_steps})
        two_ranks.run(run, config)
    samples = read(config, "samples.jsonl")
    rows = [{sample["row"] for sample in samples if sample["step"] == step} for step in (1, 2)]
    assert [len(of_step) for of_step in rows] == [4, 4] and len(rows[0] | rows[1]) == len(COUNTS)
    for sample in samples:
        count = COUNTS[sample["row"]]
        assert sample["prompt"].count("<|image_pad|>") == count
        assert int(sample["reward"]) == count
    # Before the first step, after it as the first run's last, and after the second.
    assert len(read(config, "eval_samples.jsonl")) == 3 * len(COUNTS)
    assert all(line["rollout/log_prob_mismatch"] < 1e-3 for line in read(config, "metrics.jsonl") if line["step"] > 0)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "hf")
    for folder in (tmp_path / "run" / "model", tmp_path / "hf"):
        assert isinstance(AutoProcessor.from_pretrained(folder), Qwen2_5_VLProcessor)
        AutoModelForMultimodalLM.from_pretrained(folder)


def test_broken_images_stop_both_ranks_or_are_left_out(two_ranks, media_task, tmp_path):
    """DATA-05: a file that was cut off and one that is not there, before anything is loaded and without a hang."""
    task = tmp_path / "task"
    shutil.copytree(media_task, task)
    whole = (task / "0_0.png").read_bytes()
    (task / "cut.png").write_bytes(whole[: len(whole) // 2])
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    rows[4]["images"], rows[6]["images"] = ["cut.png"], ["absent.png", "0_0.png"]
    (task / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    messages = two_ranks.run(mistake, media_config(task, tmp_path / "run"))
    assert messages[0] == messages[1] and f"row 4 (line 5): {task}/cut.png: this image cannot be read: " in messages[0]
    skipping = media_config(task, tmp_path / "run", data={"media_errors": "skip"}, train={"max_steps": 1})
    two_ranks.run(run, skipping)
    assert {sample["row"] for sample in read(skipping, "samples.jsonl")} <= {0, 1, 2, 3, 5, 7}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "internvl", "qwen2_audio"])
def test_a_step_on_each_kind_of_media_beside_text(two_ranks, tmp_path, family):
    """A rank may have text alone; engine and actor see the same."""
    tiny_media.save_model(tmp_path / "model", family)
    save_tone(tmp_path / "0.wav", 0.3, 440)
    save_video(tmp_path / "0.mp4", range(0, 100, 10), 10)
    image(16, 24).save(tmp_path / "0.png")
    media = [{"audios": "0.wav"}] if family == "qwen2_audio" else [{"images": "0.png"}, {"videos": "0.mp4"}]
    rows = [{"input": f"{i}?", "label": str(i)} | (media[i % len(media)] if i < 2 else {}) for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = media_config(tmp_path, tmp_path / "run", train={"max_steps": 1})
    two_ranks.run(run, config)
    [_, line] = read(config, "metrics.jsonl")
    assert line["rollout/log_prob_mismatch"] < 1e-3
    assert len(read(config, "samples.jsonl")) == 16


def remove_and_train(config: Config, path: Path) -> str:
    """A run whose image goes away once it was checked."""
    trainer = build_trainer(config)
    trainer.strategy.collectives.barrier()
    path.unlink(missing_ok=True)
    try:
        trainer.fit()
    except Exception as error:
        trainer.strategy.close()
        return str(error)
    return "it went on"


def test_an_image_that_goes_away_ends_both_ranks_with_its_path(two_ranks, media_task, tmp_path):
    """DATA-05: only one of the ranks has the row; the other is not left waiting."""
    task = tmp_path / "task"
    shutil.copytree(media_task, task)
    config = media_config(task, tmp_path / "run", train={"num_episodes": 1})
    messages = two_ranks.run(remove_and_train, config, task / "4_0.png")
    assert all("4_0.png: this image cannot be read" in message and "decoding media" in message for message in messages)
