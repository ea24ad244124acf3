"""Makes the models of this example: a policy that knows nothing yet, and three reward models with a taste each.

Each reward model has a vocabulary of its own and learns from pairs of random texts which one its reader prefers. No
download; some seconds a model.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import torch
import tyro
from tiny_language import TASTES, build_config, build_tokenizer, random_text, seeded, token_order
from torch import Tensor
from torch.optim import AdamW
from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from lightrft.models.collate import collate
from lightrft.models.reward_model import RewardModel, text_sample
from lightrft.utils.logging import get_logger, setup_logging

logger = get_logger("examples.colocated_rewards.prepare")

PAIRS, STEPS, HELD_OUT = 64, 150, 500
MARKER = "prepared.json"
"""Written last: a folder that has it is complete."""


def draw_pairs(taste: Callable[[str], float], count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Chosen and rejected text; a reader who likes both alike does not choose."""
    pairs: list[tuple[str, str]] = []
    while len(pairs) < count:
        worse, better = sorted((random_text(rng), random_text(rng)), key=taste)
        if taste(worse) < taste(better):
            pairs.append((better, worse))
    return pairs


def margins(model: RewardModel, ids: Callable[[str], list[int]], pairs: list[tuple[str, str]]) -> Tensor:
    """How much higher the chosen text scores than the rejected one, `(pairs,)`."""
    texts = [f"{10 + i % 90}={text}" for i, pair in enumerate(pairs) for text in pair]
    scores = model(collate([text_sample(ids(text)) for text in texts], "padded"))
    return scores[0::2] - scores[1::2]


def make_reward_model(folder: Path, name: str, seed: int, num_steps: int) -> float:
    """Trains one by Bradley and Terry's likelihood; returns the share of unseen pairs that it orders rightly."""
    rng = seeded(seed)
    order = token_order(rng)
    tokenizer = build_tokenizer(order)
    classifier = Qwen2ForSequenceClassification(build_config(order, hidden_size=48))
    model = RewardModel(classifier)
    optimizer = AdamW(model.parameters(), lr=3e-3)

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text)

    for _ in range(num_steps):
        optimizer.zero_grad()
        torch.nn.functional.softplus(-margins(model, ids, draw_pairs(TASTES[name], PAIRS, rng))).mean().backward()
        optimizer.step()
    with torch.no_grad():
        right = (margins(model, ids, draw_pairs(TASTES[name], HELD_OUT, rng)) > 0).float().mean().item()
    classifier.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return right


def make_policy(folder: Path, seed: int) -> None:
    """Random weights: every character is as likely."""
    order = token_order(seeded(seed))
    Qwen2ForCausalLM(build_config(order, hidden_size=64)).save_pretrained(folder)
    build_tokenizer(order).save_pretrained(folder)


def main(output: Path, seed: int = 0, num_steps: int = STEPS) -> None:
    """Make the models and prompts of this example.

    Args:
        output: Folder for policy/, a folder for each reward model, and prompts.jsonl.
        seed: Another seed makes other models.
        num_steps: Of each reward model's training.
    """
    setup_logging()
    disable_progress_bar()
    torch.set_num_threads(min(2, os.cpu_count() or 1))
    if (output / MARKER).exists():
        logger.info("%s is already prepared: nothing to do.", output)
        return
    make_policy(output / "policy", seed)
    accuracies = {}
    for i, name in enumerate(TASTES, start=1):
        accuracies[name] = make_reward_model(output / name, name, seed + i, num_steps)
        logger.info("reward model %s orders %.0f %% of unseen pairs rightly", name, 100 * accuracies[name])
    rows = [{"input": f"{number}=", "label": "text"} for number in range(10, 100)]
    (output / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (output / MARKER).write_text(json.dumps(accuracies), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main)
