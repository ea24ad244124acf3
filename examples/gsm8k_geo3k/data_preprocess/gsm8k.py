"""Writes GSM8K, as its authors published it, as prompts with worked answers: train.jsonl and test.jsonl."""

import json
import re
from pathlib import Path
from typing import Any, Literal, TypeAlias

import tyro

from lightrft.config import usage_errors
from lightrft.datasets.sources import Source, read_source
from lightrft.utils.logging import get_logger, setup_logging

logger = get_logger("examples.gsm8k_geo3k.data_preprocess.gsm8k")

AnswerForm: TypeAlias = Literal["boxed", "hashes"]
FORMS: dict[AnswerForm, str] = {"boxed": "\\boxed{{{}}}", "hashes": "#### {}"}
"""How an answer is written at the end, around its number; GSM8K's own answers have the hashes."""
INSTRUCTION = "Reason step by step, and end with the answer alone, as {}."
ANSWER = re.compile(r"(?P<solution>.*)\n#### (?P<number>-?[\d,]+(?:\.\d+)?)\s*", re.DOTALL)
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


def prompt_row(question: str, answer: str, form: AnswerForm = "boxed") -> dict[str, Any]:
    """Columns of a prompt from GSM8K's `question` and `answer`; `completion` is the answer as the prompt asks for it.

    Raises:
        ValueError: the answer does not end in a line `#### number`.
    """
    match = ANSWER.fullmatch(answer)
    if match is None:
        raise ValueError(f"an answer must end in a line `#### number`: {answer[-80:]!r}")
    instruction = INSTRUCTION.format(FORMS[form].format("number"))
    number = match["number"].replace(",", "")
    solution = CALCULATOR_MARK.sub("", match["solution"])
    return {
        "prompt": [{"role": "user", "content": f"{question.strip()}\n\n{instruction}"}],
        "label": number,
        "reference": solution,
        "completion": f"{solution}\n{FORMS[form].format(number)}",
    }


def prompt_rows(source: Source, form: AnswerForm) -> list[dict[str, Any]]:
    rows = []
    for index, value in source.rows:
        try:
            rows.append(prompt_row(value["question"], value["answer"], form))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source.where(index)} is no row of GSM8K: {error!r}. Check the file.") from error
    return rows


def main(
    local_dataset_path: str = "openai/gsm8k:main",
    local_save_dir: Path = Path("runs/gsm8k-data"),
    answer_form: AnswerForm = "boxed",
) -> None:
    """Make prompts of GSM8K's questions.

    Args:
        local_dataset_path: Folder with GSM8K's own train.jsonl and test.jsonl, or a hub id.
        local_save_dir: Folder for the prompts.
        answer_form: How the prompts ask for the answer, \\boxed{number} or #### number.
    """
    setup_logging()
    for split in ("train", "test"):
        with usage_errors():
            rows = prompt_rows(read_source(local_dataset_path, split), answer_form)
        local_save_dir.mkdir(parents=True, exist_ok=True)
        path = local_save_dir / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        logger.info("%s: %d prompts", path, len(rows))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
