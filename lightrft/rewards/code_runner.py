"""What a child process of the code rule runs: limits itself, then runs a program and its tests.

It is started by its path, without the package: `python -I code_runner.py LIMITS PROGRAM MODE`, LIMITS as JSON. In the
mode `pair` stdin and stdout are the program's; in the mode `tests` stdin has [token, tests] as JSON, and for each test
that passes a line with token and index goes to stdout.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import types
from typing import Any

PR_SET_PDEATHSIG = 1


def main() -> None:
    limits, path, mode = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    sys.argv = [path]
    _limit(limits)
    with open(path, encoding="utf-8") as file:
        source = file.read()
    if mode == "pair":
        _run(source, "__main__")
    else:
        _run_tests(source, *json.load(sys.stdin))


def _run(source: str, name: str) -> dict[str, Any]:
    """Runs the program as a module of that name; its names."""
    # Dataclasses look for the module of their class.
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, "program.py", "exec"), module.__dict__)
    return module.__dict__


def _limit(limits: dict[str, Any]) -> None:
    if sys.platform == "linux":
        # It ends with the grader, which may itself be killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    values = {
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for what, value in values.items():
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def _run_tests(source: str, token: str, tests: list[str]) -> None:
    # What the program prints is not what the grader reads.
    results = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    # Not __main__: the part of a program for the command line waits for input.
    namespace = _run(source, "program")
    for index, test in enumerate(tests):
        try:
            exec(compile(test, f"test {index}", "exec"), namespace)
        except BaseException:
            # SystemExit too: whatever a test raises, it has not passed.
            continue
        os.write(results, f"{token} {index}\n".encode())


if __name__ == "__main__":
    main()
