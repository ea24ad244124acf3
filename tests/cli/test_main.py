import importlib
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from lightrft import __version__
from lightrft.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_answers_without_torch(argv):
    program = f"""
import sys
from lightrft.cli.main import main
try:
    sys.exit(main({argv!r}))
finally:
    assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("usage: lightrft ")


def test_help_lists_every_sub_command_and_each_is_there(capsys):
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name}" in usage and command.purpose in usage
        assert callable(importlib.import_module(command.module).main)


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightrft {__version__}\n"


@pytest.mark.parametrize(("argv", "start"), [([], "usage: "), (["explian"], "error: no sub-command 'explian'.\n\n")])
def test_no_sub_command_is_a_usage_error(argv, start, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(start) and captured.out == ""


def test_the_script_of_pyproject_is_this_function():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert EntryPoint("lightrft", scripts["lightrft"], "console_scripts").load() is main
