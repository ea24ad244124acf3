"""Makes a tiny model that half knows the answers to questions about pictures or sounds: no download, a minute or two.

It first learns from right answers, then from answers of which most are wrong. That second stage spoils it on purpose:
it still sees, or hears, what is asked about, but seldom says so, which is what a reward can repair in a minute.
"""

import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from PIL import Image
from pupils import EOS, TURN, build_model, build_processor, build_tokenizer, words_of
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
from transformers.utils.logging import disable_progress_bar

from lightrft.config import DataConfig, usage_errors
from lightrft.datasets.media import MediaLoader
from lightrft.datasets.prompts import load_prompts
from lightrft.models.actor import Actor
from lightrft.models.collate import collate
from lightrft.trainer.rollouts import make_sample
from lightrft.types import Experience, GenerationOutput, PromptExample
from lightrft.utils.logging import get_logger, setup_logging
from lightrft.utils.metrics import write_json

logger = get_logger("examples.look_and_listen.prepare")

MARKER = "prepared.json"
VERSION = 1
"""Raise it when the same recipe would give another model."""
COLUMNS = {"images": "image", "audios": "audio"}
LEARN_CHECK_STEPS, SPOIL_CHECK_STEPS = 25, 10
NUM_CHECKED = 100


@dataclass(frozen=True)
class Recipe:
    """How the model is made; a folder is made again when it was made by another recipe."""

    seed: int = 0
    batch_size: int = 32
    learning_rate: float = 2e-3
    warmup_steps: int = 30
    learned: float = 0.9
    """Learning ends once right answers to training questions have this probability."""
    max_learn_steps: int = 2000
    wrong_share: float = 0.6
    spoiled: float = 0.45
    """Spoiling ends once they have no more than this."""
    max_spoil_steps: int = 200


@dataclass(frozen=True)
class Lesson:
    """A question with its decoded media, the right answer and other ones."""

    question: PromptExample
    right: str
    wrong: Sequence[str]


class Teacher:
    """Trains a model on lessons.

    Args:
        model: Learns.
        tokenizer: Writes the answers.
        recipe: How.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> None:
        self.model = model
        self.actor = Actor(model)
        self.tokenizer = tokenizer
        self.recipe = recipe
        self.optimizer = AdamW(model.parameters(), weight_decay=0.01)
        self.rng = random.Random(recipe.seed)

    def learn(self, lessons: Sequence[Lesson]) -> None:
        """Until right answers are likely.

        Raises:
            RuntimeError: They are not after `max_learn_steps`.
        """
        recipe = self.recipe
        for step in range(1, recipe.max_learn_steps + 1):
            self.train_step(lessons, 0.0, recipe.learning_rate * min(1.0, step / recipe.warmup_steps))
            if step % LEARN_CHECK_STEPS == 0 and self.checked(lessons, step) > recipe.learned:
                return
        raise RuntimeError(f"The model has not learned in {recipe.max_learn_steps} steps. Try another --seed.")

    def spoil(self, lessons: Sequence[Lesson]) -> None:
        """Until right answers are unlikely."""
        for step in range(1, self.recipe.max_spoil_steps + 1):
            self.train_step(lessons, self.recipe.wrong_share, self.recipe.learning_rate / 2)
            if step % SPOIL_CHECK_STEPS == 0 and self.checked(lessons, step) <= self.recipe.spoiled:
                return

    def train_step(self, lessons: Sequence[Lesson], wrong_share: float, learning_rate: float) -> None:
        chosen = self.rng.choices(lessons, k=self.recipe.batch_size)
        answers = [
            self.rng.choice(lesson.wrong) if self.rng.random() < wrong_share else lesson.right for lesson in chosen
        ]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        (-self.log_probs(chosen, answers).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def checked(self, lessons: Sequence[Lesson], step: int) -> float:
        probability = self.right_probability(lessons[:NUM_CHECKED])
        logger.info("  step %d: right answers have a probability of %.2f", step, probability)
        return probability

    @torch.no_grad()
    def right_probability(self, lessons: Sequence[Lesson]) -> float:
        """Mean probability that the model says the right answer when it is sampled."""
        return self.log_probs(lessons, [lesson.right for lesson in lessons]).exp().mean().item()

    def log_probs(self, lessons: Sequence[Lesson], answers: Sequence[str]) -> torch.Tensor:
        """Of each whole answer."""
        samples = [self.sample(lesson, answer) for lesson, answer in zip(lessons, answers, strict=True)]
        log_probs = self.actor(collate(samples, "padded"), 1.0).log_probs
        return torch.stack([part.sum() for part in log_probs.split([s.num_response_tokens for s in samples])])

    def sample(self, lesson: Lesson, answer: str) -> Experience:
        ids = self.tokenizer(said(answer))["input_ids"]
        output = GenerationOutput(ids, "stop", log_probs=None, weight_version=0)
        return make_sample(self.tokenizer, self.model.config, 0, 0, lesson.question, output)


def said(answer: str) -> str:
    return f"\\boxed{{{answer}}}{EOS}"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError where there are none."""
    if not path.is_file():
        raise ValueError(f"--data must be a folder of questions: there is no {path}. Make it first.")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def kind_of(rows: Sequence[dict[str, Any]]) -> str:
    """The kind of media in the rows; raises ValueError where there is no such column."""
    for column, kind in COLUMNS.items():
        if column in rows[0]:
            return kind
    raise ValueError(f"rows must have a column of media ({', '.join(COLUMNS)}): got {', '.join(rows[0])}.")


def questions(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Texts of the rows' prompts without marks of media."""
    texts = [message["content"] for row in rows for message in row["prompt"]]
    return [text.replace("<image>", "").replace("<audio>", "") for text in texts]


def side_of(rows: Sequence[dict[str, Any]], folder: Path) -> int:
    with Image.open(folder / rows[0]["images"][0]) as image:
        return image.width


def build(data: Path, seed: int) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A random model for the rows of a folder, and its processor."""
    rows = read_rows(data / "train.jsonl") + read_rows(data / "test.jsonl")
    kind = kind_of(rows)
    words = words_of([*questions(rows), *(said(row["reference"]).removesuffix(EOS) for row in rows), TURN])
    tokenizer = build_tokenizer(words)
    side = side_of(rows, data) if kind == "image" else 0
    return build_model(kind, tokenizer, side, seed), build_processor(kind, tokenizer, side)


def read_lessons(data: Path, split: str, pretrain: Path, processor: ProcessorMixin) -> list[Lesson]:
    """The questions of a split; a wrong answer is the right one of another question of the same label.

    Raises:
        ValueError: All questions of a label have the same answer.
    """
    flags = DataConfig(input_key="prompt", reference_key="reference", apply_chat_template=True, prompt_max_len=256)
    loader = MediaLoader(str(pretrain), processor, flags, num_workers=0)
    examples = loader.with_inputs(load_prompts(str(data), split, processor.tokenizer, flags, None, loader))
    loader.close()
    answers: dict[Any, set[str]] = {}
    for example in examples:
        answers.setdefault(example.label, set()).add(example.reference)
    if few := sorted(str(label) for label, of in answers.items() if len(of) < 2):
        raise ValueError(f"a label must have two answers at least: {', '.join(few)} in {data} has one. Add questions.")
    return [
        Lesson(example, example.reference, sorted(answers[example.label] - {example.reference})) for example in examples
    ]


def is_prepared(output: Path, recipe: Recipe) -> bool:
    """Whether the folder was finished by this very recipe: its `prepared.json` is written last."""
    marker = output / MARKER
    if not marker.exists():
        return False
    made = json.loads(marker.read_text(encoding="utf-8"))
    return made["version"] == VERSION and made["recipe"] == asdict(recipe)


def prepare(data: Path, output: Path, recipe: Recipe) -> None:
    """Makes the model, unless the folder already holds it.

    Raises:
        ValueError: `data` holds no questions.
    """
    if is_prepared(output, recipe):
        logger.info("%s is already prepared with seed %d: nothing to do.", output, recipe.seed)
        return
    start = time.monotonic()
    (output / MARKER).unlink(missing_ok=True)
    model, processor = build(data, recipe.seed)
    processor.save_pretrained(output)
    lessons = read_lessons(data, "train", output, processor)
    teacher = Teacher(model, processor.tokenizer, recipe)
    logger.info("Stage 1 of 2: a tiny model learns the answers from examples.")
    teacher.learn(lessons)
    logger.info(
        "Stage 2 of 2: it is spoiled on purpose, with examples of which %.0f %% are wrong.", 100 * recipe.wrong_share
    )
    teacher.spoil(lessons)
    model.save_pretrained(output)
    heldout = teacher.right_probability(read_lessons(data, "test", output, processor))
    seconds = time.monotonic() - start
    write_json(output / MARKER, {"version": VERSION, "recipe": asdict(recipe), "right": heldout, "seconds": seconds})
    logger.info(
        "%s is ready after %.0f s. Sampled, it answers %.0f %% of the held-out questions right.",
        output,
        seconds,
        100 * heldout,
    )


def main(data: Path, output: Path, seed: int = 0) -> None:
    """Make a model for questions about pictures or sounds.

    Args:
        data: Folder with train.jsonl and test.jsonl.
        output: Folder for the model and its processor.
        seed: Another seed makes another model.
    """
    setup_logging()
    disable_progress_bar()  # transformers' own, for a file that is written at once
    # Where DeepSpeed is installed, saving a model imports it; untold, it guesses the accelerator aloud.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    with usage_errors():
        prepare(data, output, Recipe(seed=seed))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
