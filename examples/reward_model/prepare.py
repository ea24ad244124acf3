"""Makes the reward model example's model and data: no download, well under a minute on two free cores.

The model answers complaints, and has learned from answers of which as many are rude as polite. The pairs say of two
answers to a complaint which one is more polite; nothing else will tell the model to be so.
"""

import json
import os
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import tyro
from tone import (
    SPECIAL,
    build_model,
    build_tokenizer,
    complaint_text,
    complaints,
    draw_reply,
)
from torch.optim import AdamW
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from lightrft.config import usage_errors
from lightrft.utils.logging import get_logger, setup_logging
from lightrft.utils.metrics import write_json

logger = get_logger("examples.reward_model.prepare")

Complaint = tuple[str, str]

NUM_HELDOUT = 16
"""Complaints that no model is trained on."""
NUM_PAIRS, NUM_HELDOUT_PAIRS = 2000, 400
STEPS, BATCH_SIZE, LEARNING_RATE = 400, 32, 3e-3
MARKER = "prepared.json"
VERSION = 1
"""Raise it when other files would be made."""


def split_complaints(seed: int) -> tuple[list[Complaint], list[Complaint]]:
    """Those to train on and those held out."""
    shuffled = complaints()
    random.Random(seed).shuffle(shuffled)
    return shuffled[NUM_HELDOUT:], shuffled[:NUM_HELDOUT]


def draw_pair(complaint: Complaint, rng: random.Random) -> dict[str, Any]:
    """A row: two answers of different politeness, and as margin a tenth of the difference."""
    while True:
        (first, level), (second, other) = draw_reply(rng), draw_reply(rng)
        if level != other:
            break
    chosen, rejected = (first, second) if level > other else (second, first)
    prompt = complaint_text(*complaint)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": abs(level - other) / 10}


def draw_pairs(of: Sequence[Complaint], count: int, rng: random.Random) -> list[dict[str, Any]]:
    return [draw_pair(rng.choice(of), rng) for _ in range(count)]


def prompt_rows(of: Iterable[Complaint]) -> list[dict[str, str]]:
    return [{"prompt": complaint_text(*complaint), "label": " ".join(complaint)} for complaint in of]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def learn(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, of: Sequence[Complaint], seed: int) -> float:
    """Trains on answers of every politeness; gives the last step's loss in nats a token."""
    rng = random.Random(seed)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE)
    loss, padding = torch.zeros(()), SPECIAL.index("<pad>")
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20, (STEPS - step) / 100)
        batch = tokenizer([draw_text(tokenizer, rng.choice(of), rng) for _ in range(BATCH_SIZE)], padding=True)
        ids = torch.tensor(batch["input_ids"])
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids.masked_fill(ids.eq(padding), -100)).loss
        loss.backward()
        optimizer.step()
    return loss.item()


def draw_text(tokenizer: PreTrainedTokenizerFast, complaint: Complaint, rng: random.Random) -> str:
    """A complaint and an answer as the model sees them."""
    messages = [{"role": "user", "content": complaint_text(*complaint)}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return f"{prompt}{draw_reply(rng)[0]} {SPECIAL[1]}"


def is_prepared(output: Path, seed: int) -> bool:
    marker = output / MARKER
    return marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == {"version": VERSION, "seed": seed}


def prepare(output: Path, seed: int) -> None:
    """Makes the model and the data, unless the folder already holds them.

    Raises:
        ValueError: the folder holds something else.
    """
    if is_prepared(output, seed):
        logger.info("%s is already prepared with seed %d: nothing to do.", output, seed)
        return
    if output.exists() and any(output.iterdir()) and not (output / MARKER).exists():
        raise ValueError(f"--output must be a new folder: {output} holds something else. Choose another.")
    start = time.monotonic()
    train, heldout = split_complaints(seed)
    model, tokenizer, rng = build_model(seed), build_tokenizer(), random.Random(seed)
    loss = learn(model, tokenizer, train, seed)
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    write_rows(output / "pairs.jsonl", draw_pairs(train, NUM_PAIRS, rng))
    write_rows(output / "heldout_pairs.jsonl", draw_pairs(heldout, NUM_HELDOUT_PAIRS, rng))
    write_rows(output / "prompts.jsonl", prompt_rows(train))
    write_rows(output / "heldout_prompts.jsonl", prompt_rows(heldout))
    write_json(output / MARKER, {"version": VERSION, "seed": seed})
    logger.info("%s is ready after %.0f s (loss %.2f nats a token).", output, time.monotonic() - start, loss)


def main(output: Path, seed: int = 0) -> None:
    """Make the reward model example's model and data.

    Args:
        output: Folder for model/, pairs.jsonl, heldout_pairs.jsonl, prompts.jsonl and heldout_prompts.jsonl.
        seed: Another seed makes another model and another split of the complaints.
    """
    setup_logging()
    disable_progress_bar()
    # Where DeepSpeed is installed, saving a model imports it; untold, it guesses the accelerator aloud.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)  # A model this small gains nothing from a second one.
    with usage_errors():
        prepare(output, seed)


if __name__ == "__main__":
    tyro.cli(main)
