import os
import time
from pathlib import Path

import psutil
import pytest

from lightrft.rewards.code import last_block, read_tests, run_code
from lightrft.rewards.records import Ungradable

ADD = "def add(a, b):\n    return a + b\n"


def block(program: str) -> str:
    return f"I would write\n```python\n{program}\n```\nwhich works."


def test_the_share_of_passed_asserts_is_paid():
    tests = "assert add(1, 2) == 3\nassert add(2, 2) == 5\nassert add(0, 0) == 0\nassert add('a', 'b') == 'ab'"
    assert run_code(block(ADD), tests=tests) == 0.75
    assert run_code(block(ADD), tests=tests, all_or_nothing=True) == 0.0
    assert run_code(block(ADD), tests=["assert add(1, 2) == 3"], all_or_nothing=True) == 1.0


def test_statements_before_an_assert_belong_to_it():
    tests = "x = len('ab')\nassert add(x, 1) == 3\nassert add(x, x) == 4\n"
    assert read_tests(tests) == ["x = len('ab')\nassert add(x, 1) == 3\n", "assert add(x, x) == 4\n"]
    assert run_code(block(ADD), tests=tests) == 1.0
    function = "def check(f):\n    assert f(1, 1) == 3\ncheck(add)"
    assert run_code(block(ADD), tests=function) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "2 3\n", "output": "5\n"}, {"input": "1 1", "output": "3"}],
        {"inputs": ["2 3", "1 1"], "outputs": ["5", 3]},
        '{"inputs": ["2 3", "1 1"], "outputs": ["5  ", "3"]}',
    ],
)
def test_printed_output_is_compared_line_by_line(tests):
    program = "if __name__ == '__main__':\n    print(sum(map(int, input().split())))"
    assert run_code(block(program), tests=tests) == 0.5


def test_the_gold_answer_holds_the_tests_where_no_column_does():
    assert run_code(block(ADD), gold="assert add(1, 1) == 2") == 1.0
    assert run_code(block(ADD), gold="1", tests="assert add(1, 1) == 2") == 1.0


@pytest.mark.parametrize("tests", [None, "", [], "assert (", {"inputs": ["1"], "outputs": []}, [3], "85", "x = 1"])
def test_tests_that_cannot_be_read_are_no_zero(tests):
    with pytest.raises(Ungradable):
        run_code(block(ADD), tests=tests)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints\n```\n7\n```", "a\n"),
        ("```bash\nls\n```\ntext\n```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("<think>```python\na\n```</think>", None),
        ("```python\na\n", None),
        ("```c\na\n```", None),
        ("a", None),
    ],
)
def test_the_program_is_the_last_closed_block(response, program):
    assert last_block(response) == program


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "def add(a, b): raise SystemExit",
        "print('0\\n1\\ntoken 0')\ndef add(a, b): return 0",
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'passed 0\\n')\n    except OSError: pass",
        "def add(",
        "1 / 0",
    ],
)
def test_a_program_that_ends_early_or_fails_has_passed_nothing(program):
    assert run_code(block(program), tests="assert add(1, 1) == 2") == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\nwhile True: time.sleep(1)",
        "x = [0] * 10**10",
        "def f(): f()\nf()",
        "open('big', 'wb').write(bytes(10**9))",
        "while True: print('x' * 10**6)",
        "input()",
    ],
)
def test_what_takes_too_much_is_ended_and_paid_nothing(program):
    started = time.monotonic()
    for tests in ("assert True", [{"input": "", "output": ""}]):
        assert run_code(block(program), tests=tests, seconds=1.5) == 0.0
    assert time.monotonic() - started < 10


def test_tests_after_one_that_hangs_are_not_passed_but_those_before_are():
    program = "def f(x):\n    while x == 1: pass\n    return x"
    assert run_code(block(program), tests="assert f(0) == 0\nassert f(1) == 1\nassert f(2) == 2", seconds=2) == 1 / 3


@pytest.mark.parametrize(
    ("options", "end"), [("", ""), ("", "while True: pass"), (", start_new_session=True", "while True: pass")]
)
def test_what_a_program_has_started_ends_with_it(tmp_path, options, end):
    path = tmp_path / "pid"
    child = f"open({str(path)!r}, 'w').write(str(os.getpid())); import time; time.sleep(600)"
    command = f"[sys.executable, '-c', {'import os; ' + child!r}]"
    program = f"import os, subprocess, sys, time\nsubprocess.Popen({command}{options})\n"
    program += f"while not os.path.exists({str(path)!r}) or not open({str(path)!r}).read(): time.sleep(0.01)\n" + end
    run_code(block(program), tests="assert True", seconds=2, processes=4096)
    pid = int(Path(path).read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)


def test_a_program_is_a_module():
    program = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport sys\n"
        "@dataclass\nclass Point:\n    x: int\nprint(Point(3).x, len(sys.argv))\n"
    )
    assert run_code(block(program), tests="assert Point(3) == Point(3)\nassert len(sys.argv) == 1") == 1.0
    assert run_code(block(program), tests=[{"input": "", "output": "3 1"}]) == 1.0


def test_a_program_sees_none_of_the_runs_environment_or_folder(monkeypatch):
    monkeypatch.setenv("LIGHTRFT_TEACHER_API_KEY", "secret")
    program = "import os\nkeys = [name for name in os.environ if 'KEY' in name]\nfiles = os.listdir('.')"
    tests = f"assert keys == []\nassert files == []\nassert os.getcwd() != {os.getcwd()!r}"
    assert run_code(block(program), tests=tests) == 1.0
