"""Says what a finished run of this example has reached, and what to try next."""

import json
from pathlib import Path

import tyro
from rich import get_console
from rich.panel import Panel


def describe(run: Path) -> str:
    """Text for a person, from the run's summary.

    Raises:
        ValueError: if the run has not finished.
    """
    path = run / "summary.json"
    if not path.is_file():
        raise ValueError(
            f"A finished run has a summary.json: {run} has none. Look at the errors of the training above."
        )
    summary = json.loads(path.read_text(encoding="utf-8"))
    return f"""\
Sums that SmolLM2 was never trained on, sampled as in training:
          right   in the tags
  before {summary["accuracy_before"]:6.1%}  {summary["format_before"]:6.1%}
  after  {summary["accuracy_after"]:6.1%}  {summary["format_after"]:6.1%}   \
{summary["steps"]} steps in {summary["train_seconds"]:.0f} s

Run folder: {run}
  reward.png      the curve
  samples.jsonl   every answer and its reward
  metrics.jsonl   every figure of each step
  model/          loads with transformers

Try next:
  make smollm2 ARGS="--bf16 --actor_learning_rate 2e-5"   (see smollm2.yaml)
  make smollm2 ARGS="--seed 1" RUN=runs/smollm2-1
  .venv/bin/tensorboard --logdir {run}"""


def main(run: Path) -> None:
    """Print a run's result.

    Args:
        run: The run's folder, as given to --save_path.
    """
    get_console().print(Panel(describe(run), title="SmolLM2", title_align="left"), highlight=False, markup=False)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
