"""Says what a finished run of this example has reached, and whether its model looks and listens."""

from collections.abc import Sequence
from pathlib import Path

import tyro
from answers import Answerer, Question, read_questions, swapped
from rich import get_console
from rich.panel import Panel
from transformers.utils.logging import disable_progress_bar

from lightrft.config import usage_errors
from lightrft.rewards.math import grade
from lightrft.utils.metrics import read_summary

FIGURES = ("reward_before", "reward_after")


def right_share(answerer: Answerer, questions: Sequence[Question]) -> float:
    answers = answerer.answers(questions)
    grades = [grade(answer, each.reference) for answer, each in zip(answers, questions, strict=True)]
    return sum(value == 1.0 for value in grades) / len(grades)


def describe(run: Path, questions: Sequence[Question]) -> str:
    """Text for a person, from the run's summary and its model.

    Raises:
        ValueError: The run has not come to its end.
    """
    summary = read_summary(run, FIGURES)
    answerer = Answerer(run / "model")
    return f"""\
Held-out questions answered right, sampled as in training:
  before {summary["reward_before"]:6.1%}
  after  {summary["reward_after"]:6.1%}   {summary["steps"]} steps in {summary["train_seconds"]:.0f} s

By transformers alone, from {run}/model, without sampling:
  asked about their own media     {right_share(answerer, questions):6.1%}
  asked about those of another    {right_share(answerer, swapped(questions)):6.1%}   (guessing)"""


def main(run: Path, data: Path) -> None:
    """Print a run's result.

    Args:
        run: The run's folder, as given to --save_path.
        data: Folder of the questions.
    """
    disable_progress_bar()  # transformers' own, for a model that is read at once
    with usage_errors():
        text = describe(run, read_questions(data / "test.jsonl"))
    get_console().print(Panel(text, title=run.name, title_align="left"), highlight=False, markup=False)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
