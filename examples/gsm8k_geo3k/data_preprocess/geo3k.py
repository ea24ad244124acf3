"""Writes Geometry3K as prompts with images: train.jsonl and test.jsonl, and the images that no file holds yet.

It reads the layout that its authors publish (`train/<id>/data.json` and `train/<id>/img_diagram.png`), and tables with
the columns `images`, `problem` (or `question`) and `answer`, in a folder or on the hub as hiyouga/geometry3k is.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from lightrft.config import usage_errors
from lightrft.datasets.media_files import references
from lightrft.datasets.sources import Source, read_source
from lightrft.utils.logging import get_logger, setup_logging

logger = get_logger("examples.gsm8k_geo3k.data_preprocess.geo3k")

INSTRUCTION = (
    "First think about the problem, inside <think> </think> tags. Then give the final answer alone, in \\boxed{}."
)
LABEL = "geo3k"
"""Names the part of a reward recipe that grades the rows."""
DATA, DIAGRAM = "data.json", "img_diagram.png"
MARK = "<image>"


def prompt_row(question: str, answer: str, images: Sequence[str]) -> dict[str, Any]:
    """Columns of a prompt: its images stand where the question has marks, or in front of it."""
    text = question.strip()
    if MARK not in text:
        text = MARK * len(images) + text
    return {
        "prompt": [{"role": "user", "content": f"{text} {INSTRUCTION}"}],
        "images": list(images),
        "label": LABEL,
        "reference": answer.strip(),
    }


def problem_source(folder: Path) -> Source:
    """The problems of a split as their authors publish them, by number.

    Raises:
        ValueError: There are none, or one cannot be read.
    """
    names = sorted((path.parent for path in folder.glob(f"*/{DATA}")), key=lambda path: (len(path.name), path.name))
    if not names:
        raise ValueError(f"a folder of problems must hold <id>/{DATA}: {folder} does not. Check the path.")
    rows = []
    for index, problem in enumerate(names):
        try:
            rows.append((index, published_problem(json.loads((problem / DATA).read_text("utf-8")), problem)))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{problem / DATA} is no problem of Geometry3K: {error!r}. Check the file.") from error
    return Source(str(folder), rows, folder=folder)


def published_problem(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """One `data.json`: the answer is the letter of one of the choices."""
    letter = data["answer"]
    if not re.fullmatch("[A-Z]", letter):
        raise ValueError(f"the answer must be a letter: {letter!r}")
    choice = data["choices"][ord(letter) - ord("A")]
    return {"problem": data["problem_text"], "answer": choice, "images": [str((folder / DIAGRAM).absolute())]}


def read_problems(path: str, split: str) -> Source:
    """A split, in either form."""
    folder = Path(path) / split
    # Their archives hold a folder of the same name once more.
    for candidate in (folder, folder / split):
        if any(candidate.glob(f"*/{DATA}")):
            return problem_source(candidate)
    return read_source(path, split)


def saved_images(images: Any, source: Source, name: str, output: Path) -> list[str]:
    """Paths from `output` on; an image that only the table holds is written there."""
    paths = []
    for number, image in enumerate(references(images, source.folder)):
        if isinstance(image, str) and not image.startswith("data:"):
            paths.append(os.path.relpath(image, output))
            continue
        if not isinstance(image, bytes):
            raise ValueError(f"an image must be a path or the bytes of a file: got {type(image).__name__}")
        path = output / "images" / f"{name}_{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
        paths.append(os.path.relpath(path, output))
    return paths


def prompt_rows(source: Source, split: str, output: Path) -> list[dict[str, Any]]:
    rows = []
    for index, value in source.rows:
        try:
            question = value["problem"] if "problem" in value else value["question"]
            images = saved_images(value["images"], source, f"{split}_{index}", output)
            rows.append(prompt_row(question, value["answer"], images))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{source.where(index)} is no row of Geometry3K: {error!r}. Check the file.") from error
    return rows


def main(local_dataset_path: str = "hiyouga/geometry3k", local_save_dir: Path = Path("runs/geo3k-data")) -> None:
    """Make prompts of Geometry3K's problems.

    Args:
        local_dataset_path: Folder with its splits train and test, or a hub id.
        local_save_dir: Folder for the prompts.
    """
    setup_logging()
    for split in ("train", "test"):
        local_save_dir.mkdir(parents=True, exist_ok=True)
        with usage_errors():
            rows = prompt_rows(read_problems(local_dataset_path, split), split, local_save_dir.absolute())
        path = local_save_dir / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        logger.info("%s: %d prompts", path, len(rows))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
