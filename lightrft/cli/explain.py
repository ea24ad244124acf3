"""`lightrft explain`: what a configuration makes of a step, before anything is loaded."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from lightrft.cli.tables import sections_table
from lightrft.config import parse_config, usage_errors
from lightrft.config.checks import range_errors

USAGE = """usage: lightrft explain [CONFIG.yaml] [flags] [--world_size N]
       lightrft explain --algorithms

Shows what each batch flag makes of a step on N ranks, what does not divide, which roles are loaded, and what each phase
holds on a GPU at its peak. No weights are read, and nothing is written. The flags are those of a training; N is
WORLD_SIZE, or 1, where it is not given.
The exit code is 1 where the configuration would be refused.
--algorithms lists advantage estimators, estimators of the KL divergence, policy losses and corrections, with their
formulas and sources."""


def main(argv: Sequence[str]) -> int:
    """Prints the explanation; returns 1 where the configuration would be refused."""
    if list(argv) in (["-h"], ["--help"], []):
        print(USAGE, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    console = Console()
    if list(argv) == ["--algorithms"]:
        console.print(sections_table(algorithms(), widths=(20,)))
        return 0
    with usage_errors():
        flags, world_size = split_world_size(argv)
    config = parse_config(config_first(flags), prog="lightrft explain")
    if errors := list(range_errors(config)):
        print_problems(console, errors)
        return 1
    from lightrft.cli.explanation import explain

    explanation = explain(config, world_size)
    sections = {
        title: [(line.name, line.value, line.meaning) for line in lines]
        for title, lines in explanation.sections.items()
    }
    console.print(sections_table(sections, widths=(21, 11)))
    print_problems(console, explanation.problems)
    return 1 if explanation.problems else 0


def config_first(argv: Sequence[str]) -> list[str]:
    """`CONFIG.yaml ...` as `--config CONFIG.yaml ...`."""
    return [*argv] if not argv or argv[0].startswith("-") else ["--config", *argv]


def split_world_size(argv: Sequence[str]) -> tuple[list[str], int]:
    """The flags of a training, and the number of ranks."""
    flags, given = list(argv), []
    for position, token in reversed(list(enumerate(argv))):
        flag, equals, value = token.partition("=")
        if flag in ("--world_size", "--world-size"):
            end = position + (1 if equals else 2)
            given.append(value if equals else "".join(argv[position + 1 : end]))
            del flags[position:end]
    text = given[0] if given else os.environ.get("WORLD_SIZE", "1")
    if len(given) > 1 or not text.isdecimal() or int(text) == 0:
        raise ValueError(f"--world_size must be a number of ranks, given once: {', '.join(given) or text}.")
    return flags, int(text)


def print_problems(console: Console, problems: Sequence[str]) -> None:
    console.print()
    if not problems:
        console.print("Nothing keeps this from starting.", style="green")
        return
    console.print("This would be refused:", style="bold red")
    for problem in problems:
        console.print(f"- {problem}", markup=False, highlight=False, soft_wrap=True)


def algorithms() -> dict[str, list[list[str]]]:
    """Lines for each function: its name, and what its docstring says of formula and source."""
    from lightrft.ops.advantages import ADVANTAGE_ESTIMATORS
    from lightrft.ops.corrections import CORRECTIONS
    from lightrft.ops.kl import KL_ESTIMATORS
    from lightrft.ops.losses import POLICY_LOSSES

    return {
        "--advantage_estimator": described(ADVANTAGE_ESTIMATORS),
        "--kl_estimator": described(KL_ESTIMATORS),
        "--policy_loss": described(POLICY_LOSSES),
        "--rollout_correction": described(CORRECTIONS),
    }


def described(functions: Mapping[str, Callable[..., object]]) -> list[list[str]]:
    lines = []
    for name, function in functions.items():
        text = inspect.getdoc(function) or ""
        lines += [[name, text.splitlines()[0]], ["", part(text, "Formula")], ["", part(text, "Source")]]
    return lines


def part(docstring: str, title: str) -> str:
    """The paragraph that begins with `title:`, on one line and without it."""
    match = re.search(rf"^{title}:(.+?)(\n\n|\Z)", docstring, re.DOTALL | re.MULTILINE)
    assert match is not None, f"no {title}: {docstring}"
    return " ".join(match[1].split())
