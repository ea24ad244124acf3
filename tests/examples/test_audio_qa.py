"""The audio example: its sounds hold the answers, and its script's flags are flags."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.audio_qa.prepare import RATE, beeps, main, two_tones
from lightrft.config import DataConfig, check_config, parse_config
from lightrft.datasets.media import MediaLoader
from lightrft.datasets.media_files import load_sound
from lightrft.datasets.prompts import load_prompts
from lightrft.rewards.math import grade
from tests import tiny_media

EXAMPLE = Path(__file__).parents[2] / "examples" / "audio_qa"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("audio_qa")
    main(folder, num_train=12, num_test=8)
    return folder


def rows(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def loud_parts(samples: np.ndarray) -> int:
    """How often a sound begins: 10 ms blocks that are loud after one that is not."""
    blocks = np.abs(samples[: len(samples) // 160 * 160].reshape(-1, 160)).max(axis=1) > 0.1
    return int(np.count_nonzero(np.diff(np.concatenate([[False], blocks]).astype(int)) == 1))


def pitch(samples: np.ndarray) -> float:
    """The loudest frequency in Hz."""
    return float(np.abs(np.fft.rfft(samples)).argmax() * RATE / len(samples))


def test_the_sounds_hold_the_answers(data):
    for row in rows(data, "train") + rows(data, "test"):
        samples, rate = load_sound(str(data / row["audios"][0]), False, RATE)
        assert rate == RATE
        if row["label"] == "count":
            assert loud_parts(samples) == int(row["reference"])
        else:
            half = len(samples) // 2
            assert row["reference"] == ("higher" if pitch(samples[half:]) > pitch(samples[:half]) else "lower")
        assert grade(f"So it is \\boxed{{{row['reference']}}}.", row["reference"]) == 1.0
    assert {row["reference"] for row in rows(data, "train")} > {"higher", "lower"}


def test_beeps_and_tones_are_as_long_as_said():
    """3 x (0.12 + 0.12) s and 0.4 + 0.12 + 0.4 s at 16 kHz."""
    assert (len(beeps(3, 440)), len(two_tones(300, 500))) == (11_520, 14_720)


def test_the_prompts_are_what_a_model_that_hears_takes(data, tmp_path):
    """A second of sound is 25 tokens, and the tiny model hears one: 0.92 s of two tones are 92 frames, 23 tokens."""
    flags = DataConfig(input_key="prompt", apply_chat_template=True, media_errors="skip")
    processor = tiny_media.qwen2_audio()
    loader = MediaLoader(tiny_media.save_processor(tmp_path, "qwen2_audio"), processor, flags, num_workers=0)
    prompts = load_prompts(str(data), "test", processor.tokenizer, flags, None, loader)
    compared = [example for example in prompts if example.label == "pitch"]
    assert len(compared) == 4
    for example in compared:
        assert example.prompt_ids.count(processor.audio_token_id) == 23
    loader.close()


def test_the_run_script_fits_eight_gpus(data, tmp_path, capsys):
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    torchrun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": str(data), "ENGINE": "torch"}
    script = EXAMPLE / "run_grpo_qwen2_audio_7b.sh"
    ended = subprocess.run([script], env=environment, capture_output=True, text=True, check=True)
    arguments = json.loads(ended.stdout)
    config = parse_config(arguments[arguments.index("examples/audio_qa/train.py") + 1 :])
    check_config(config, 8)
    assert "warning" not in capsys.readouterr().err
    assert (config.rollout.n_samples_per_prompt, config.rollout.generate_max_len) == (4, 1024)
