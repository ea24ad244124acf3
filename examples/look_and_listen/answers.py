"""Answers of an exported model, by transformers alone: what a user of the folder gets."""

import json
import wave
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM, AutoProcessor, BatchFeature

BATCH_SIZE = 50
MOST_TOKENS = 8
COLUMNS = {"images": "image", "audios": "audio"}


@dataclass(frozen=True)
class Question:
    """A row of the data, with the media that it is asked about."""

    text: str
    kind: str
    media: Path
    label: str
    reference: str


def read_questions(path: Path) -> list[Question]:
    return [question(json.loads(line), path.parent) for line in path.read_text(encoding="utf-8").splitlines()]


def question(row: dict[str, Any], folder: Path) -> Question:
    [column] = [column for column in COLUMNS if column in row]
    text = row["prompt"][0]["content"].replace(f"<{COLUMNS[column]}>", "")
    return Question(text, COLUMNS[column], folder / row[column][0], row["label"], row["reference"])


def swapped(questions: Sequence[Question]) -> list[Question]:
    """Each question about the media of the next one of its label."""
    by_label: dict[str, list[Question]] = {}
    for each in questions:
        by_label.setdefault(each.label, []).append(each)
    return [
        Question(each.text, each.kind, other.media, each.label, each.reference)
        for group in by_label.values()
        for each, other in zip(group, [*group[1:], group[0]], strict=True)
    ]


def read_sound(path: Path) -> np.ndarray:
    """Samples of 16 bits as numbers from -1 to 1."""
    with wave.open(str(path), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


class Answerer:
    """A folder's model and processor.

    Args:
        folder: Of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.processor.tokenizer.padding_side = "left"
        self.model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answers(self, questions: Sequence[Question]) -> list[str]:
        """The likeliest answer to each."""
        starts = range(0, len(questions), BATCH_SIZE)
        return [answer for start in starts for answer in self._batch(questions[start : start + BATCH_SIZE])]

    def inputs(self, questions: Sequence[Question]) -> BatchFeature:
        """The model's, of questions about one kind of media; prompts are padded on the left."""
        texts = [
            self.processor.apply_chat_template(
                [{"role": "user", "content": [{"type": each.kind}, {"type": "text", "text": each.text}]}],
                add_generation_prompt=True,
                tokenize=False,
            )
            for each in questions
        ]
        if questions[0].kind == "audio":
            rate = self.processor.feature_extractor.sampling_rate
            media = {"audio": [read_sound(each.media) for each in questions], "sampling_rate": rate}
        else:
            media = {"images": [Image.open(each.media).convert("RGB") for each in questions]}
        return self.processor(text=texts, **media, padding=True, return_tensors="pt")

    def _batch(self, questions: Sequence[Question]) -> Iterable[str]:
        inputs = self.inputs(questions)
        made = self.model.generate(**inputs, max_new_tokens=MOST_TOKENS, do_sample=False)
        return self.processor.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
