"""Plots: a run's course as a picture."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

SHARE_AVERAGED = 20
"""The moving average is over one in so many of the run's steps."""
FEW_STEPS = 30
"""Up to here each step is marked."""


@dataclass(frozen=True)
class Course:
    """A metric at some steps, in their order."""

    steps: Sequence[int]
    values: Sequence[float]


def course(rows: Iterable[Mapping[str, Any]], metric: str) -> Course:
    """The metric at each step that has it; of a step that comes twice, as it came last."""
    found = {row["step"]: row[metric] for row in rows if row.get(metric) is not None}
    return Course(sorted(found), [found[step] for step in sorted(found)])


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those before it, `window` in all, or as many as there are."""
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - window) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]


def plot_rewards(metrics: Path, picture: Path) -> None:
    """Draws the rewards in a metrics.jsonl as a PNG; a run without any leaves no picture."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    training, evaluation = course(rows, "reward/mean"), course(rows, "eval/mean")
    if training.steps or evaluation.steps:
        draw_rewards(training, evaluation, picture)


def draw_rewards(training: Course, evaluation: Course, picture: Path) -> None:
    """Writes the picture whole or not at all."""
    # Imported here: it takes a second. Without pyplot there is no display, and no state that a user's own could share.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    if training.steps:
        window = max(1, len(training.steps) // SHARE_AVERAGED)
        marker = "." if len(training.steps) <= FEW_STEPS else ""
        label = "training" if window == 1 else "training, each step"
        color = "tab:blue" if window == 1 else "lightsteelblue"
        axes.plot(training.steps, training.values, color=color, marker=marker, linewidth=1, label=label)
        if window > 1:
            average = moving_average(training.values, window)
            axes.plot(training.steps, average, color="tab:blue", linewidth=2, label=f"training, mean of {window} steps")
    if evaluation.steps:
        axes.plot(evaluation.steps, evaluation.values, color="tab:orange", marker="o", linewidth=1, label="evaluation")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    temporary = picture.with_name(f"{picture.name}.writing")
    figure.savefig(temporary, dpi=150, format="png")
    os.replace(temporary, picture)
