"""Draws the picture questions: how many dots of a colour are there? No download, seconds.

A picture holds one to five dots of each of two colours, and nothing but the picture tells how many.
"""

import json
import random
from pathlib import Path
from typing import Any

import tyro
from PIL import Image, ImageDraw

from lightrft.utils.logging import get_logger, setup_logging

logger = get_logger("examples.look_and_listen.dots")

COLOURS = {"red": (220, 40, 40), "blue": (40, 60, 220)}
CELLS, CELL_PIXELS = 4, 8
"""Along a side: dots stand in cells of their own, so that none covers another."""
RADIUS = (2.5, 3.2)
MOST_DOTS = 5
INSTRUCTION = "Answer with one number alone, in \\boxed{}."
LABEL = "count"


def draw(counts: dict[str, int], rng: random.Random) -> Image.Image:
    """A white picture with as many dots of each colour."""
    side = CELLS * CELL_PIXELS
    image = Image.new("RGB", (side, side), "white")
    pen = ImageDraw.Draw(image)
    colours = [colour for colour, count in counts.items() for _ in range(count)]
    for colour, cell in zip(colours, rng.sample(range(CELLS**2), len(colours)), strict=True):
        radius = rng.uniform(*RADIUS)
        room = CELL_PIXELS / 2 - radius
        x, y = (CELL_PIXELS * (at + 0.5) + rng.uniform(-room, room) for at in (cell % CELLS, cell // CELLS))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
    return image


def rows(split: str, count: int, seed: int, output: Path) -> list[dict[str, Any]]:
    """Prompts, whose pictures are written beside them."""
    rng = random.Random(f"{seed} {split}")
    (output / "pictures").mkdir(parents=True, exist_ok=True)
    made = []
    for index in range(count):
        counts = {colour: rng.randint(1, MOST_DOTS) for colour in COLOURS}
        colour = rng.choice(list(COLOURS))
        name = f"pictures/{split}_{index:04}.png"
        draw(counts, rng).save(output / name)
        question = f"<image>How many {colour} dots are there, 1 to {MOST_DOTS}? {INSTRUCTION}"
        messages = [{"role": "user", "content": question}]
        made.append({"prompt": messages, "images": [name], "label": LABEL, "reference": str(counts[colour])})
    return made


def main(output: Path = Path("runs/dots-data"), num_train: int = 1000, num_test: int = 200, seed: int = 0) -> None:
    """Draw pictures, and ask about them.

    Args:
        output: Folder for train.jsonl, test.jsonl and the pictures.
        num_train: Questions to train on.
        num_test: Questions to evaluate on.
        seed: Of all that is drawn.
    """
    setup_logging()
    for split, count in (("train", num_train), ("test", num_test)):
        made = rows(split, count, seed, output)
        path = output / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
        logger.info("%s: %d questions", path, len(made))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
