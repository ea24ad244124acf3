"""Makes the addition example's model and data: no download, about a minute on two free cores.

The model is a character-level Qwen2 of 0.8M parameters that reads "47+85=" and answers "132". It first learns addition,
then trains on answers of which most are wrong. That second stage spoils it on purpose: it still knows how to add, but
samples right answers rarely, which is the state that reinforcement learning from a reward can repair in a minute.
"""

import json
import os
import random
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from adder import Pair, answer_accuracy, build_model, build_tokenizer, encode, text_loss
from display import StageDisplay
from torch import Tensor
from torch.optim import AdamW
from transformers import Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from lightrft.utils.logging import get_logger, setup_logging
from lightrft.utils.metrics import write_json

logger = get_logger("examples.addition.prepare")

MISTAKES = (-20, -10, -9, -2, -1, 1, 2, 9, 10, 20)
"""What a wrong answer is off by: slips that a learner makes, in the last digit, the tens or the carry."""
MARKER = "prepared.json"
USUAL_LEARN_STEPS = 650
"""For the display alone: learning ends by accuracy."""
VERSION = 1
"""Raise it when the same recipe would give another model or other files."""


@dataclass(frozen=True)
class Recipe:
    """How the model and the data are made; a folder is rebuilt when it was made by another recipe."""

    seed: int = 0
    num_heldout: int = 500
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    learn_batch_size: int = 128
    learn_check_steps: int = 50
    max_learn_steps: int = 3000
    learned_accuracy: float = 0.9
    """Learning ends once greedy decoding is right on more than this share of the held-out pairs."""
    spoil_batch_size: int = 256
    wrong_share: float = 0.7
    """Share of wrong answers while the model is spoiled."""
    spoil_steps: int = 60
    max_spoil_steps: int = 120
    spoil_check_steps: int = 10
    spoiled_accuracy: float = 0.22
    """Spoiling goes on past `spoil_steps` while sampled accuracy is above this."""


def split_pairs(recipe: Recipe) -> tuple[list[Pair], list[Pair]]:
    """Training and held-out pairs of two-digit numbers; no pair is in both."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(recipe.seed).shuffle(pairs)
    return pairs[recipe.num_heldout :], pairs[: recipe.num_heldout]


def write_rows(path: Path, pairs: Iterable[Pair]) -> None:
    rows = ({"input": f"{a}+{b}=", "label": str(a + b)} for a, b in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def draw_batch(pairs: list[Pair], size: int, wrong_share: float, rng: random.Random) -> Tensor:
    """Ids `(size, PROMPT_LEN + ANSWER_LEN)` of random pairs, this share of them with a wrong answer."""
    chosen = rng.choices(pairs, k=size)
    errors = [rng.choice(MISTAKES) if rng.random() < wrong_share else 0 for _ in chosen]
    return torch.tensor([encode(pair, max(0, sum(pair) + error)) for pair, error in zip(chosen, errors, strict=True)])


def train_step(model: Qwen2ForCausalLM, optimizer: AdamW, ids: Tensor, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad()
    text_loss(model, ids).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def learn(model: Qwen2ForCausalLM, optimizer: AdamW, recipe: Recipe, display: StageDisplay) -> None:
    """Trains on right answers until greedy decoding adds the held-out pairs.

    Raises:
        RuntimeError: if it has not learned to add within `max_learn_steps`.
    """
    pairs, heldout = split_pairs(recipe)
    rng = random.Random(recipe.seed)
    for step in range(1, recipe.max_learn_steps + 1):
        warmup = min(1.0, step / recipe.warmup_steps)
        ids = draw_batch(pairs, recipe.learn_batch_size, 0.0, rng)
        train_step(model, optimizer, ids, recipe.learning_rate * warmup)
        display.advance()
        if step % recipe.learn_check_steps == 0:
            accuracy = answer_accuracy(model, heldout)
            display.report(f"greedy {accuracy:.0%} right")
            if accuracy > recipe.learned_accuracy:
                return
    raise RuntimeError(f"The model has not learned addition in {recipe.max_learn_steps} steps. Try another --seed.")


def spoil(model: Qwen2ForCausalLM, optimizer: AdamW, recipe: Recipe, display: StageDisplay) -> None:
    """Trains on mostly wrong answers until sampling is right only on `spoiled_accuracy` of the held-out pairs."""
    pairs, heldout = split_pairs(recipe)
    rng = random.Random(recipe.seed + 1)
    for step in range(1, recipe.max_spoil_steps + 1):
        ids = draw_batch(pairs, recipe.spoil_batch_size, recipe.wrong_share, rng)
        train_step(model, optimizer, ids, recipe.learning_rate)
        display.advance()
        if step % recipe.spoil_check_steps == 0:
            accuracy = sampled_accuracy(model, heldout, recipe)
            display.report(f"sampled {accuracy:.0%} right")
            if step >= recipe.spoil_steps and accuracy <= recipe.spoiled_accuracy:
                return


def sampled_accuracy(model: Qwen2ForCausalLM, pairs: list[Pair], recipe: Recipe) -> float:
    return answer_accuracy(model, pairs, torch.Generator().manual_seed(recipe.seed))


def is_prepared(output: Path, recipe: Recipe) -> bool:
    """Whether the folder was finished, by this very recipe: its `prepared.json` is written last."""
    marker = output / MARKER
    if not marker.exists():
        return False
    made = json.loads(marker.read_text(encoding="utf-8"))
    return made["version"] == VERSION and made["recipe"] == asdict(recipe)


def prepare(output: Path, recipe: Recipe) -> None:
    """Makes the model and both data files, unless the folder already holds them."""
    if is_prepared(output, recipe):
        logger.info("%s is already prepared with seed %d: nothing to do.", output, recipe.seed)
        return
    start = time.monotonic()
    (output / MARKER).unlink(missing_ok=True)
    model = make_model(recipe)
    accuracies = write_folder(output, model, recipe)
    seconds = time.monotonic() - start
    write_json(output / MARKER, {"version": VERSION, "recipe": asdict(recipe), **accuracies, "seconds": seconds})
    logger.info(
        "%s is ready after %.0f s. Held-out pairs answered right: %.0f %% greedily, %.0f %% when sampled. "
        "The model knows more than it says: that gap is what the training closes.",
        output,
        seconds,
        100 * accuracies["greedy_accuracy"],
        100 * accuracies["sampled_accuracy"],
    )


def make_model(recipe: Recipe) -> Qwen2ForCausalLM:
    model = build_model(recipe.seed)
    optimizer = AdamW(model.parameters(), weight_decay=0.01)
    with StageDisplay(
        "Stage 1 of 2: a tiny model learns two-digit addition from examples.", USUAL_LEARN_STEPS
    ) as display:
        learn(model, optimizer, recipe, display)
    title = f"Stage 2 of 2: it is spoiled on purpose, with examples of which {recipe.wrong_share:.0%} are wrong."
    with StageDisplay(title, recipe.spoil_steps) as display:
        spoil(model, optimizer, recipe, display)
    return model


def write_folder(output: Path, model: Qwen2ForCausalLM, recipe: Recipe) -> dict[str, float]:
    """Writes the model, its tokenizer and the data; gives the model's accuracies on the held-out pairs."""
    pairs, heldout = split_pairs(recipe)
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output / "model")
    build_tokenizer().save_pretrained(output / "model")
    write_rows(output / "train.jsonl", pairs)
    write_rows(output / "heldout.jsonl", heldout)
    return {
        "greedy_accuracy": answer_accuracy(model, heldout),
        "sampled_accuracy": sampled_accuracy(model, heldout, recipe),
    }


def main(output: Path, seed: int = 0) -> None:
    """Make the addition example's model and data.

    Args:
        output: Folder for model/, train.jsonl and heldout.jsonl.
        seed: Another seed makes another model and another split of the pairs.
    """
    setup_logging()
    disable_progress_bar()  # transformers' own, for a file that is written at once
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    prepare(output, Recipe(seed=seed))


if __name__ == "__main__":
    tyro.cli(main)
