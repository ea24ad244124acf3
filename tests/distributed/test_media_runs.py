"""Whole runs of models that take media, on two ranks."""

import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoModelForMultimodalLM, AutoProcessor, Qwen2_5_VLProcessor

from lightrft.config import Config
from lightrft.trainer import build_trainer
from lightrft.trainer.export import export_checkpoint
from lightrft.trainer.media_feed import NumberedPrompt
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


def test_images_stay_with_their_samples_when_minibatches_are_dealt_anew(two_ranks, media_task, tmp_path):
    """DATA-06: without learning, every update gives each sample the log-probs that it had before.

    16 samples in two minibatches of 8, twice, each dealt by one permutation of all; with the image of another sample a
    response has other ones.
    """
    train = {"train_batch_size": 8, "micro_train_batch_size": 2, "max_epochs": 2, "max_steps": 1}
    optimizer = {"actor_learning_rate": 1e-30}
    config = media_config(media_task, tmp_path / "run", train=train, optimizer=optimizer)
    two_ranks.run(run, config)
    [_, line] = read(config, "metrics.jsonl")
    assert line["train/grad_norm"] > 0
    assert abs(line["train/ppo_kl"]) < 1e-6 and line["train/clip_low"] == line["train/clip_high"] == 0


def test_broken_images_stop_both_ranks_or_are_left_out(two_ranks, media_task, tmp_path):
    """DATA-05: a JPEG that was cut off and a file that is not there, before anything is loaded and without a hang."""
    task = tmp_path / "task"
    shutil.copytree(media_task, task)
    image(64, 64).save(task / "whole.jpg")
    whole = (task / "whole.jpg").read_bytes()
    (task / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    rows[4]["images"], rows[6]["images"] = ["cut.jpg"], ["absent.png", "0_0.png"]
    (task / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    messages = two_ranks.run(mistake, media_config(task, tmp_path / "run"))
    assert messages[0] == messages[1] and f"row 4 (line 5): {task}/cut.jpg: this image cannot be read: " in messages[0]
    skipping = media_config(task, tmp_path / "run", data={"media_errors": "skip"}, train={"max_steps": 1})
    two_ranks.run(run, skipping)
    assert {sample["row"] for sample in read(skipping, "samples.jsonl")} <= {0, 1, 2, 3, 5, 7}


def test_a_placeholder_in_a_prompt_without_media_is_told_with_its_row_before_models_are_loaded(
    two_ranks, media_task, tmp_path
):
    task = tmp_path / "task"
    shutil.copytree(media_task, task)
    row = {"input": [{"role": "user", "content": [{"type": "text", "text": "is <|image_pad|> one?"}]}], "label": "0"}
    with (task / "prompts.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    number = len((task / "prompts.jsonl").read_text().splitlines()) - 1
    for message in two_ranks.run(mistake, media_config(task, tmp_path / "run")):
        assert f"row {number}: a prompt without media must not have the token that stands for them: it has 1" in message


def test_dynamic_sampling_a_teacher_and_texts_take_prompts_with_images(two_ranks, media_task, tmp_path):
    """Texts are trained on beside them: their micro-batches, which have no image, reach the tower on both ranks."""
    tiny_media.save_model(tmp_path / "teacher", "qwen2_5_vl", seed=1)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"input": f"text {i}"}) + "\n" for i in range(8)))
    owners = {
        "model": {"teacher_pretrain": str(tmp_path / "teacher")},
        "data": {"pretrain_data": str(tmp_path / "texts.jsonl")},
        "rollout": {"dynamic_sampling": True, "dynamic_sampling_tries": 2},
        "algorithm": {"ptx_coef": 0.1, "opd_kl_coef": 0.1},
    }
    config = media_config(media_task, tmp_path / "run", train={"max_steps": 1}, **owners)
    two_ranks.run(run, config)
    [_, line] = read(config, "metrics.jsonl")
    assert line["rollout/log_prob_mismatch"] < 1e-3
    assert line["dynamic_sampling/tries"] in (1, 2) and line["kl/teacher"] > 0 and line["train/ptx_loss"] > 0


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


def seconds_to_end(config: Config, folder: Path) -> float:
    """Of a run of one step, while what is decoded ahead for a second one hangs."""
    trainer = build_trainer(config)
    prefetch = trainer.media.prefetch
    hung_at = []

    def hanging(prompts: Sequence[NumberedPrompt]) -> None:
        trainer.strategy.collectives.barrier()
        if trainer.strategy.is_rank_0:
            for path in folder.glob("*_*.png"):
                path.unlink()
                os.mkfifo(path)
        trainer.strategy.collectives.barrier()
        prefetch(prompts)
        hung_at.append(time.monotonic())

    trainer.media.prefetch = hanging
    trainer.fit()
    return time.monotonic() - hung_at[0]


def test_a_decoder_that_hangs_does_not_delay_the_end_of_a_run(two_ranks, media_task, tmp_path):
    """The images of the next step have become pipes that nobody writes to; a request may take five minutes."""
    task = tmp_path / "task"
    shutil.copytree(media_task, task)
    config = media_config(task, tmp_path / "run", data={"media_workers": 2}, train={"max_steps": 1})
    assert max(two_ranks.run(seconds_to_end, config, task, timeout=120)) < 60
    assert len(read(config, "samples.jsonl")) == 16
