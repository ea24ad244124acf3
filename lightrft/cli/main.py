"""The `lightrft` command: sub-commands, each a module that is imported when it is asked for."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lightrft import __version__


@dataclass(frozen=True)
class Command:
    module: str
    """Its `main(argv) -> exit code` takes what follows the sub-command."""
    purpose: str


COMMANDS = {
    "doctor": Command("lightrft.cli.doctor", "what this machine has, and what is missing for which flag"),
    "explain": Command("lightrft.cli.explain", "what a configuration makes of a step, before anything is loaded"),
    "export": Command("lightrft.cli.export", "a checkpoint as a Hugging Face folder"),
    "serve-rm": Command("lightrft.cli.serve_rm", "a reward function or model behind HTTP, for --remote_rm_url"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sub-command that the first argument names.

    Args:
        argv: Arguments without the program's name; None takes those of the process.

    Returns:
        The exit code: 2 for a command line that names no sub-command.
    """
    name, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if name in COMMANDS:
        return importlib.import_module(COMMANDS[name].module).main(rest)
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"lightrft {__version__}")
        return 0
    problem = f"error: no sub-command {name!r}.\n\n" if name else ""
    print(f"{problem}{usage()}", file=sys.stderr)
    return 2


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: lightrft COMMAND ...", "", *lines, "", "lightrft COMMAND --help says more."])


if __name__ == "__main__":
    raise SystemExit(main())
