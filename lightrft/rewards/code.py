"""Code: programs in responses, run against tests.

The limits are there for accidents: endless loops, endless output, memory, files. They are no sandbox. A program has the
rights of the user who trains; run what you do not trust in a container or a virtual machine.
"""

import ast
import contextlib
import json
import math
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrft.rewards.answers import after_thinking
from lightrft.rewards.process_tree import kill_tree
from lightrft.rewards.records import Ungradable

RUNNER = Path(__file__).with_name("code_runner.py")
FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n`]*\n?", re.MULTILINE)
PYTHON = frozenset(("python", "python3", "py"))
CODE_SECONDS = 10.0
"""For a program's tests together, unless the recipe says otherwise."""
MAX_OUTPUT_BYTES = 2**20
MAX_FILE_BYTES = 16 * 2**20
MIB = 2**20


@dataclass(frozen=True)
class Pair:
    """What a program reads, and what it must print."""

    given: str
    expected: str


def run_code(
    response: str,
    gold: Any = None,
    tests: Any = None,
    all_or_nothing: bool = False,
    seconds: float = CODE_SECONDS,
    memory_mib: int = 1024,
    processes: int = 0,
) -> float:
    """The share of the tests that the program in the last ```python block passes; 0 without a block.

    It runs in child processes (`python -I`) in an empty folder of their own, without the environment's variables, and
    with limits for accidents, not against attackers. What it has started ends with it, but for daemons.

    Args:
        response: The generated text.
        gold: The tests, where no column is called `tests`.
        tests: Python statements in one text, of which each assert at the top is a test, or in a list, each a test; or
            pairs of standard input and output: [{"input": ..., "output": ...}] or {"inputs": [...], "outputs": [...]}.
            All of it may be JSON.
        all_or_nothing: 1 where all tests pass, else 0.
        seconds: For all tests together, of the clock and of each process's CPU.
        memory_mib: Address space of each process.
        processes: That a program may start, threads too; Linux counts all of the user's, and none of root's.

    Raises:
        Ungradable: There are no tests, or they cannot be read.
    """
    cases = read_tests(gold if tests is None else tests)
    program = last_block(response)
    if program is None:
        return 0.0
    limits = {
        "cpu_seconds": math.ceil(seconds),
        "memory_bytes": memory_mib * MIB,
        "file_bytes": MAX_FILE_BYTES,
        "processes": processes,
    }
    deadline = time.monotonic() + seconds
    pairs = [case for case in cases if isinstance(case, Pair)]
    statements = [case for case in cases if isinstance(case, str)]
    with tempfile.TemporaryDirectory(prefix="lightrft-code-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "program.py")
        path.write_text(program, encoding="utf-8", errors="replace")
        passed = sum(_prints(pair, path, limits, deadline) for pair in pairs)
        passed += _num_passed(statements, path, limits, deadline) if statements else 0
    return float(passed == len(cases)) if all_or_nothing else passed / len(cases)


def last_block(response: str) -> str | None:
    """The last closed block of Python behind the thoughts, or without one the last that names no language."""
    text = after_thinking(response)
    fences = [*FENCE.finditer(text)]
    blocks = [
        (opening[1].lower(), text[opening.end() : end.start()])
        for opening, end in zip(fences[::2], fences[1::2], strict=False)
    ]
    python = [code for language, code in blocks if language in PYTHON]
    return next(iter(python[::-1] or [code for language, code in reversed(blocks) if not language]), None)


def read_tests(tests: Any) -> list[str | Pair]:
    """Statements and pairs.

    Raises:
        Ungradable: There are none, or they cannot be read.
    """
    if isinstance(tests, str):
        tests = _from_json(tests)
    cases = [*_cases(tests)] if tests else []
    if not cases:
        raise Ungradable(f"The code rule needs tests, as statements or as pairs of input and output: {tests!r:.200}.")
    return cases


def _from_json(text: str) -> Any:
    if not text.lstrip().startswith(("[", "{", '"')):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _cases(tests: Any) -> list[str | Pair]:
    match tests:
        case str():
            return [*_statements(tests)]
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs):
            return [Pair(_text(given), _text(expected)) for given, expected in zip(inputs, outputs, strict=True)]
        case {"input": given, "output": expected}:
            return [Pair(_text(given), _text(expected))]
        case [*items]:
            return [case for item in items for case in ([item] if isinstance(item, str) else _cases(item))]
    raise Ungradable(f"The code rule cannot read its tests: {tests!r:.200}.")


def _statements(text: str) -> Sequence[str]:
    """Each assert at the top as a test of its own, with what stands before it."""
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise Ungradable(f"The code rule's tests are no Python: {error}.") from error
    if not any(isinstance(node, ast.Assert | ast.Call | ast.Raise) for node in ast.walk(module)):
        # A label of 85 is Python too, and every program passes it.
        raise Ungradable(f"The code rule's tests must test something: {text!r:.200} cannot fail.")
    tests, start = [], 0
    lines = text.splitlines(keepends=True)
    for statement in module.body:
        if isinstance(statement, ast.Assert) and statement.end_lineno is not None:
            tests.append("".join(lines[start : statement.end_lineno]))
            start = statement.end_lineno
    return tests or [text]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _prints(pair: Pair, program: Path, limits: Mapping[str, int], deadline: float) -> bool:
    output, code = _run(program, "pair", limits, pair.given, deadline)
    return code == 0 and output is not None and _lines(output) == _lines(pair.expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _num_passed(tests: Sequence[str], program: Path, limits: Mapping[str, int], deadline: float) -> int:
    # A program that ends its process early, or prints what it likes, has passed nothing: it does not know the token.
    token = secrets.token_hex(16)
    output, _ = _run(program, "tests", limits, json.dumps([token, tests]), deadline)
    passed = {f"{token} {index}" for index in range(len(tests))}
    return len(passed & set((output or "").splitlines()))


def _run(program: Path, mode: str, limits: Mapping[str, int], given: str, deadline: float) -> tuple[str | None, int]:
    """What a process prints and how it ends; None for too much, or for no time left."""
    if time.monotonic() >= deadline:
        return None, 1
    empty = tempfile.TemporaryDirectory(dir=program.parent, ignore_cleanup_errors=True)
    with tempfile.TemporaryFile() as stdin, empty as folder:
        stdin.write(given.encode(errors="replace"))
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", str(RUNNER), json.dumps(limits), str(program), mode],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=_environment(folder),
            # A group of its own, so that all that it starts can be ended with it.
            start_new_session=True,
        )
        try:
            output = _read(process, deadline)
            code = process.wait(max(deadline - time.monotonic(), 0.0)) if output is not None else 1
        except subprocess.TimeoutExpired:
            code = 1
        finally:
            _end(process)
    return (None if output is None else output.decode(errors="replace")), code


def _read(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """All that the process prints until it closes its output or the deadline; None where that is too much."""
    assert process.stdout is not None
    parts, size = [], 0
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (seconds := deadline - time.monotonic()) > 0 and selector.select(seconds):
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                break
            parts.append(part)
            size += len(part)
            if size > MAX_OUTPUT_BYTES:
                return None
    return b"".join(parts)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process, and what it has started."""
    if process.returncode is None:
        kill_tree(process.pid)
        process.wait()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    process.stdout.close()


def _environment(folder: str) -> dict[str, str]:
    """Of the run's own environment, which holds keys, a program sees the search path alone."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "LANG": "C.UTF-8", **one_thread}
