"""Says what a finished run of this example has reached, and what its reward phase held."""

import json
from pathlib import Path
from typing import Any

import tyro
from rich import get_console
from rich.panel import Panel
from tiny_language import TASTES

from lightrft.config import usage_errors
from lightrft.utils.metrics import EVAL_SAMPLES, METRICS, read_summary

KIB_PER_GIB = 2**20
PREFIX, ENDING = "memory/reward_peak/", "_gib"


def describe(run: Path) -> str:
    """Text for a person, from the run's files.

    Raises:
        ValueError: the run has not come to its end, or was given other rewards.
    """
    components = [*TASTES, "length"]
    summary = read_summary(run, [f"{name}_{when}" for name in components for when in ("before", "after")])
    rows = read_lines(run / EVAL_SAMPLES)
    first, last = ([row["response"] for row in rows if row["step"] == step] for step in (0, summary["steps"]))
    scores = [
        f"  {name:<12} {summary[f'{name}_before']:8.2f} {summary[f'{name}_after']:8.2f} {readers(name, first, last)}"
        for name in components
    ]
    return "\n".join(
        [
            f"Mean scores, {summary['steps']} steps in {summary['train_seconds']:.0f} s; and the reader's own taste:",
            "                 before    after   before    after",
            *scores,
            "",
            f"before  {first[0]!r}, {first[1]!r}",
            f"after   {last[0]!r}, {last[1]!r}",
            "",
            "Ledger of rank 0: the peak of the last step's reward phase",
            *ledger(read_lines(run / METRICS)[-1]),
            "",
            "On a CPU the host is the device, and nothing moves. On a GPU the reward",
            "models are there in this phase alone: all three, or one at a time with",
            "--reward_residency one.",
        ]
    )


def readers(name: str, first: list[str], last: list[str]) -> str:
    """What the model was to learn, of both texts; nothing for the rule."""
    return " ".join(f"{sum(map(TASTES[name], texts)) / len(texts):8.2f}" for texts in (first, last) if name in TASTES)


def ledger(line: dict[str, Any]) -> list[str]:
    """A line for each owner, the largest first."""
    owners = {
        name.removeprefix(PREFIX).removesuffix(ENDING).replace("_", " "): value
        for name, value in line.items()
        if name.startswith(PREFIX)
    }
    return [f"  {name:<28} {held * KIB_PER_GIB:8.1f} KiB" for name, held in sorted(owners.items(), key=lambda o: -o[1])]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(run: Path) -> None:
    """Print a run's result.

    Args:
        run: The run's folder, as given to --save_path.
    """
    with usage_errors():
        text = describe(run)
    get_console().print(Panel(text, title="Colocated rewards", title_align="left"), highlight=False, markup=False)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
