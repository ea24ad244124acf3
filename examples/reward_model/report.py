"""Says what the reward model and the model that learned from it have reached."""

import json
from pathlib import Path

import tyro
from rich import get_console
from rich.panel import Panel
from tone import politeness

from lightrft.config import usage_errors
from lightrft.utils.metrics import EVAL_SAMPLES, read_summary


def describe(reward_model: Path, policy: Path) -> str:
    """Text for a person, from the summaries of both runs and the answers of the second.

    Raises:
        ValueError: a run has not come to its end.
    """
    pairs = read_summary(reward_model, ("accuracy_before", "accuracy_after"))
    score = read_summary(policy, ("reward_before", "reward_after"))
    before, after = judged(policy, 0), judged(policy, score["steps"])
    return f"""\
Held-out pairs, of which the reward model prefers the more polite answer:
  before {pairs["accuracy_before"]:6.1%}
  after  {pairs["accuracy_after"]:6.1%}   {pairs["steps"]} steps in {pairs["train_seconds"]:.0f} s

Answers to held-out complaints, after learning from its score alone:
         score   politeness (-3 to 3)   no such answer
  before {score["reward_before"]:5.2f}   {before[0]:20.2f}   {before[1]:14.1%}
  after  {score["reward_after"]:5.2f}   {after[0]:20.2f}   {after[1]:14.1%}   \
{score["steps"]} steps in {score["train_seconds"]:.0f} s"""


def judged(run: Path, step: int) -> tuple[float, float]:
    """Mean politeness of a step's answers by the rule that made the pairs, and the share of those it cannot read."""
    lines = (run / EVAL_SAMPLES).read_text(encoding="utf-8").splitlines()
    samples = [sample for line in lines if (sample := json.loads(line))["step"] == step]
    levels = [politeness(sample["response"]) for sample in samples]
    read = [level for level in levels if level is not None]
    return sum(read) / max(1, len(read)), 1 - len(read) / max(1, len(levels))


def main(reward_model: Path, policy: Path) -> None:
    """Print the results of both runs.

    Args:
        reward_model: Run folder of the reward model.
        policy: Run folder of the model that learned from it.
    """
    with usage_errors():
        text = describe(reward_model, policy)
    get_console().print(Panel(text, title="Reward model", title_align="left"), highlight=False, markup=False)


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.Positional,))
