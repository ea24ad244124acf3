"""Says what GRPO after SFT has reached on GSM8K, and draws its course."""

from pathlib import Path

import tyro
from rich import get_console
from rich.panel import Panel

from lightrft.config import usage_errors
from lightrft.utils.metrics import METRICS, read_summary
from lightrft.utils.plots import plot_rewards

FIGURES = ("accuracy_before", "accuracy_after")


def describe(run: Path) -> str:
    """Text for a person, from the run's summary.

    Raises:
        ValueError: the run has not come to its end, or was given another reward.
    """
    summary = read_summary(run, FIGURES)
    return f"""\
Test questions answered right, greedily:
  after SFT           {summary["accuracy_before"]:6.1%}
  after SFT and GRPO  {summary["accuracy_after"]:6.1%}   {summary["steps"]} steps in {summary["train_seconds"]:.0f} s"""


def main(run: tyro.conf.Positional[Path], picture: Path | None = None) -> None:
    """Print a run's result.

    Args:
        run: The run's folder, as given to --save_path.
        picture: A PNG of the rewards in its metrics.jsonl.
    """
    with usage_errors():
        text = describe(run)
    get_console().print(Panel(text, title="GSM8K", title_align="left"), highlight=False, markup=False)
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        plot_rewards(run / METRICS, picture)


if __name__ == "__main__":
    tyro.cli(main)
