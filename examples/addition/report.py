"""Says what a finished run of this example has reached, and what to try next."""

from pathlib import Path

import tyro
from rich import get_console
from rich.panel import Panel

from lightrft.config import usage_errors
from lightrft.utils.metrics import read_summary

FIGURES = ("accuracy_before", "accuracy_after")


def describe(run: Path) -> str:
    """Text for a person, from the run's summary.

    Raises:
        ValueError: the run has not come to its end, or was given another reward.
    """
    summary = read_summary(run, FIGURES)
    return f"""\
Held-out sums answered right, sampled as in training:
  before {summary["accuracy_before"]:6.1%}
  after  {summary["accuracy_after"]:6.1%}   {summary["steps"]} steps in {summary["train_seconds"]:.0f} s

Run folder: {run}
  reward.png      the curve
  samples.jsonl   every answer and its reward
  metrics.jsonl   every figure of each step
  config.yaml     every flag of the run
  model/          loads with transformers

Try next:
  make quickstart ARGS="--temperature 0.7"
  make quickstart ARGS="--advantage_estimator gae"   (PPO with a critic)
  make quickstart SEED=1 RUN=runs/seed-1             (another model)
  .venv/bin/tensorboard --logdir {run}"""


def main(run: Path) -> None:
    """Print a run's result.

    Args:
        run: The run's folder, as given to --save_path.
    """
    with usage_errors():
        text = describe(run)
    get_console().print(Panel(text, title="Quickstart", title_align="left"), highlight=False, markup=False)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
