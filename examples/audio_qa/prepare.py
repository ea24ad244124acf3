"""Makes the audio example's questions: beeps to be counted, and two tones to be compared. No download, seconds.

Each sound is a WAV file of 16 kHz, and nothing but the sound tells the answer: without ears a model can but guess.
"""

import json
import random
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from lightrft.utils.logging import get_logger, setup_logging

logger = get_logger("examples.audio_qa.prepare")

RATE = 16_000
BEEP_SECONDS, GAP_SECONDS = 0.12, 0.12
TONE_SECONDS = 0.4
FADE_SECONDS = 0.01
"""A tone that begins at once would click."""
MOST_BEEPS = 5
HERTZ = (300.0, 1200.0)
INTERVALS = (1.2, 1.8)
"""Of the higher tone to the lower one."""
INSTRUCTION = "Answer with one {} alone, in \\boxed{{}}."
COUNT, PITCH = "count", "pitch"


def tone(hertz: float, seconds: float) -> np.ndarray:
    """Samples of a sine from -0.5 to 0.5."""
    times = np.arange(round(seconds * RATE)) / RATE
    fade = np.clip(np.minimum(times, seconds - times) / FADE_SECONDS, 0.0, 1.0)
    return 0.5 * fade * np.sin(2 * np.pi * hertz * times)


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE))


def beeps(count: int, hertz: float) -> np.ndarray:
    return np.concatenate([part for _ in range(count) for part in (silence(GAP_SECONDS), tone(hertz, BEEP_SECONDS))])


def two_tones(first: float, second: float) -> np.ndarray:
    return np.concatenate([tone(first, TONE_SECONDS), silence(GAP_SECONDS), tone(second, TONE_SECONDS)])


def counting(rng: random.Random) -> tuple[str, str, np.ndarray]:
    """A question, its answer and its sound."""
    count = rng.randint(1, MOST_BEEPS)
    question = f"How many beeps are there, 1 to {MOST_BEEPS}? {INSTRUCTION.format('number')}"
    return question, str(count), beeps(count, rng.uniform(*HERTZ))


def comparing(rng: random.Random) -> tuple[str, str, np.ndarray]:
    """As `counting`."""
    low = rng.uniform(*HERTZ)
    high = low * rng.uniform(*INTERVALS)
    is_higher = rng.random() < 0.5
    question = f"Is the second tone higher or lower than the first? {INSTRUCTION.format('word')}"
    return question, "higher" if is_higher else "lower", two_tones(*((low, high) if is_higher else (high, low)))


def save(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def rows(split: str, count: int, seed: int, output: Path) -> list[dict[str, Any]]:
    """Prompts, half of each kind, whose sounds are written beside them."""
    rng = random.Random(f"{seed} {split}")
    (output / "sounds").mkdir(parents=True, exist_ok=True)
    made = []
    for index in range(count):
        label = (COUNT, PITCH)[index % 2]
        question, answer, samples = (counting if label == COUNT else comparing)(rng)
        name = f"sounds/{split}_{index:04}.wav"
        save(output / name, samples)
        messages = [{"role": "user", "content": f"<audio>{question}"}]
        made.append({"prompt": messages, "audios": [name], "label": label, "reference": answer})
    return made


def write(path: Path, made: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    logger.info("%s: %d questions", path, len(made))


def main(output: Path = Path("runs/audio-qa-data"), num_train: int = 2000, num_test: int = 200, seed: int = 0) -> None:
    """Make sounds and questions about them.

    Args:
        output: Folder for train.jsonl, test.jsonl and the sounds.
        num_train: Questions to train on.
        num_test: Questions to evaluate on.
        seed: Of all that is drawn.
    """
    setup_logging()
    for split, count in (("train", num_train), ("test", num_test)):
        write(output / f"{split}.jsonl", rows(split, count, seed, output))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
