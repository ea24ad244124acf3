"""Grader processes: RWD-05, and the deaths of everything around them."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lightrft.rewards import grader_processes
from lightrft.rewards.grader_server import GradeItem, GraderSpec
from lightrft.rewards.pool import GraderPool
from lightrft.rewards.records import Grade, RewardInput

GRADERS = """
import ctypes, os, subprocess, sys, time

kept = []

def f(response, label=None, factor=1, path=None):
    match response:
        case "hang": time.sleep(600)
        case "spin":
            while True: pass
        case "power": return 9 ** 9 ** 9 ** 9
        case "recurse": return f(response)
        case "allocate": return bytearray(2**45)
        case "hoard":
            while True: kept.append(bytearray(2**26))
        case "raise": raise KeyError("theirs")
        case "nan": return float("nan")
        case "text": return "1"
        case "exit": sys.exit(3)
        case "die": os._exit(3)
        case "crash": ctypes.string_at(0)
        case "child" | "session":
            child = subprocess.Popen(["sleep", "600"], start_new_session=response == "session")
            with open(path, "w") as file:
                file.write(str(child.pid))
            time.sleep(600)
        case "fork": os.fork()
        case "orphan":
            os.kill(os.getppid(), 9)
            time.sleep(600)
        case "pid": return os.getpid()
        case "meet":
            open(os.path.join(path, str(os.getpid())), "w").close()
            while len(os.listdir(path)) < 2:
                time.sleep(0.01)
        case "modules": return float("torch" in sys.modules or "transformers" in sys.modules)
        case "main": return float(vars(sys.modules["__main__"]).get("IS_SCRIPT", False))
    return factor

async def later(response): return 7.0
"""
LIMIT = 0.5
SLACK = 1.5
"""Seconds that a busy machine may take besides."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graders") / "mine.py"
    path.write_text(GRADERS)
    return path


@pytest.fixture
def pool(path: Path) -> Iterator[GraderPool]:
    specs = [GraderSpec(f"{path}:f", {}), GraderSpec(f"{path}:f", {"factor": 3}), GraderSpec(f"{path}:later", {})]
    pool = GraderPool(specs, num_workers=2, timeout_seconds=LIMIT)
    yield pool
    pool.close()


def item(response: str, row: int = 0, grader: int = 0, **extra: object) -> GradeItem:
    return GradeItem(grader, RewardInput("prompt", response, "label", None, extra, row, "stop"))


def graded(pool: GraderPool, *responses: str) -> list[Grade]:
    return pool.grade([item(response, row) for row, response in enumerate(responses)])


def seconds_of(pool: GraderPool, *responses: str) -> tuple[list[Grade], float]:
    graded(pool, "ok", "ok")
    start = time.monotonic()
    return graded(pool, *responses), time.monotonic() - start


def test_rows_are_graded_in_order_by_the_function_and_the_options_that_are_asked_for(pool):
    grades = pool.grade([item("ok", row, grader=row % 3) for row in range(200)])
    assert [grade.value for grade in grades] == [[1.0, 3.0, 7.0][row % 3] for row in range(200)]
    assert pool.grade([]) == []


def test_rows_are_shared_by_as_many_processes_as_there_may_be(path, tmp_path):
    """Each of two rows waits until another process has the other; two processes never have three."""
    pool = GraderPool([GraderSpec(f"{path}:f", {})], num_workers=2, timeout_seconds=30)
    try:
        grades = pool.grade([item("meet", row, path=str(tmp_path)) for row in range(2)])
        assert [grade.value for grade in grades] == [1.0, 1.0]
        pids = {grade.value for grade in graded(pool, *["pid"] * 50)}
        assert 1 <= len(pids) <= 2 and os.getpid() not in pids
    finally:
        pool.close()


@pytest.mark.parametrize("response", ["hang", "spin", "power"])
def test_a_row_that_passes_its_limit_is_ungradable_and_the_others_have_their_grades(pool, response):
    """RWD-05: 9^(9^(9^9)) among 8 answers."""
    grades, seconds = seconds_of(pool, *["ok"] * 4, response, *["ok"] * 3)
    assert [grade.value for grade in grades] == [1.0] * 4 + [None] + [1.0] * 3
    fault = grades[4].fault
    assert fault.kind == "ungradable" and "row 4: it took longer than --reward_timeout_seconds 0.5" in fault.message
    assert LIMIT <= seconds < 2 * LIMIT + SLACK


def test_a_hundred_hanging_rows_on_two_processes_end_at_the_batchs_deadline(pool):
    """RWD-05: two start at 0 and two at 0.5 s; when the second is over, 96 have not had their turn."""
    grades, seconds = seconds_of(pool, *["hang"] * 100)
    assert Counter(grade.fault.kind for grade in grades) == {"ungradable": 4, "error": 96}
    assert {grade.value for grade in grades} == {None}
    for row, grade in enumerate(grades):
        assert f"row {row}: " in grade.fault.message
    assert "no time was left for it: the batch has had 1 s" in grades[99].fault.message
    assert 2 * LIMIT <= seconds < 2 * LIMIT + SLACK
    # The next batch is none the worse for it.
    assert [grade.value for grade in graded(pool, "ok", "ok")] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("recurse", "RecursionError: maximum recursion depth exceeded"),
        ("raise", "KeyError: 'theirs'"),
        ("nan", "returned nan (float) for row 1"),
        ("text", "returned '1' (str) for row 1"),
        ("exit", "SystemExit: 3"),
        ("die", "row 1: the grader process ended on it, by exit code 3"),
        ("crash", "row 1: the grader process ended on it, by signal 11"),
    ],
)
def test_a_failure_is_an_error_of_its_row_alone(pool, response, message):
    first, bad, last = graded(pool, "ok", response, "ok")
    assert (first.value, bad.value, last.value) == (1.0, None, 1.0)
    assert bad.fault.kind == "error" and "mine.py:f" in bad.fault.message and "row 1" in bad.fault.message
    assert message in bad.fault.message


def test_a_row_that_allocates_without_end_is_ungradable_long_before_the_machine_is_out_of_memory(pool, path):
    patient = GraderPool([GraderSpec(f"{path}:f", {})], num_workers=1, timeout_seconds=30)
    try:
        for response in ("allocate", "hoard"):
            # What filled the memory of its process is gone with that.
            first, bad, last = graded(patient, "ok", response, "ok")
            assert (first.value, bad.value, last.value) == (1.0, None, 1.0)
            assert (
                bad.fault.kind == "ungradable" and "row 1: it took more than the 2 GiB of memory" in bad.fault.message
            )
    finally:
        patient.close()


@pytest.mark.parametrize("child", ["child", "session"])
def test_what_a_killed_grader_has_started_ends_with_it(pool, tmp_path, child):
    """Code execution starts processes of its own."""
    [grade] = pool.grade([item(child, path=str(tmp_path / "pid"))])
    assert grade.fault.kind == "ungradable"
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(timeout=5)


def test_a_function_that_forks_and_returns_twice_answers_once(path):
    """The second answer would be the next row's grade."""
    pool = GraderPool([GraderSpec(f"{path}:f", {}), GraderSpec(f"{path}:f", {"factor": 3})], 1, timeout_seconds=30)
    try:
        grades = pool.grade([item("fork" if row % 2 else "ok", row, grader=1 - row % 2) for row in range(20)])
        assert [grade.value for grade in grades] == [[3.0, 1.0][row % 2] for row in range(20)]
    finally:
        pool.close()


def test_a_row_that_cannot_be_sent_is_an_error_of_its_own(pool):
    ok, bad = pool.grade([item("ok", 0), item("ok", 1, secret=lambda: 0)])
    assert ok.value == 1.0 and bad.fault.kind == "error"
    assert "row 1: its columns could not be sent to a grader process:\n" in bad.fault.message


def test_a_function_that_no_process_can_load_fails_at_once_with_its_traceback(tmp_path):
    (tmp_path / "mine.py").write_text("import os\nif 'ENTER' not in os.environ: 1 / 0\ndef f(response): return 1")
    pool = GraderPool([GraderSpec(f"{tmp_path}/mine.py:f", {})], num_workers=2, timeout_seconds=30)
    start = time.monotonic()
    grades = graded(pool, *["ok"] * 10)
    pool.close()
    assert time.monotonic() - start < 10
    for grade in grades:
        assert grade.fault.kind == "error" and "could not load its functions:" in grade.fault.message
        assert "ZeroDivisionError" in grade.fault.message


def test_a_pool_whose_server_was_killed_says_so_and_the_next_batch_has_another(pool):
    graded(pool, "ok")
    server = pool._processes._server
    workers = psutil.Process(server.pid).children()
    server.kill()
    server.wait()
    psutil.wait_procs(workers, timeout=5)
    assert not any(worker.is_running() for worker in workers)
    assert [grade.value for grade in graded(pool, "ok", "ok")] == [1.0, 1.0]


def test_a_batch_that_has_its_server_killed_says_so(pool):
    with pytest.raises(ConnectionError, match="the process that starts the graders has ended"):
        graded(pool, *["orphan"] * 4)


def test_a_batch_whose_server_is_killed_or_hangs_fails_and_the_next_one_has_another(path, monkeypatch):
    """No grade of the one is taken for one of the other."""
    monkeypatch.setattr(grader_processes, "SERVER_SECONDS", 5.0)
    monkeypatch.setattr(grader_processes, "END_SECONDS", 0.1)
    pool = GraderPool([GraderSpec(f"{path}:f", {})], num_workers=2, timeout_seconds=3)
    try:
        for what, error in ((signal.SIGKILL, ConnectionError), (signal.SIGSTOP, TimeoutError)):
            graded(pool, "ok")
            threading.Timer(0.3, os.kill, (pool._processes._server.pid, what)).start()
            with pytest.raises(error):
                graded(pool, "hang", "hang", *["ok"] * 3)
            assert [grade.value for grade in graded(pool, "ok", "ok", "ok")] == [1.0] * 3
    finally:
        pool.close()


def test_a_process_that_dies_between_two_batches_costs_no_row(path):
    """As the kernel may choose it when memory is short."""
    pool = GraderPool([GraderSpec(f"{path}:f", {})], num_workers=1, timeout_seconds=30)
    try:
        [pid] = (grade.value for grade in graded(pool, "pid"))
        os.kill(int(pid), signal.SIGKILL)
        while psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        start = time.monotonic()
        assert [grade.value for grade in graded(pool, "ok", "ok", "ok")] == [1.0] * 3
        assert time.monotonic() - start < 10
    finally:
        pool.close()


def test_graders_import_no_torch(pool):
    assert graded(pool, "modules")[0].value == 0.0


def test_nothing_is_left_after_close(pool):
    graded(pool, "ok", "ok")
    server = psutil.Process(pool._processes._server.pid)
    processes = [server, *server.children(recursive=True)]
    assert len(processes) == 3
    pool.close()
    assert not any(process.is_running() for process in processes)


SCRIPT = """
IS_SCRIPT = True
import os, signal, sys, time
import psutil
from lightrft.rewards.grader_server import GradeItem, GraderSpec
from lightrft.rewards.pool import GraderPool
from lightrft.rewards.records import RewardInput

def item(response):
    return GradeItem(0, RewardInput("prompt", response, "label", None, {}, 0, "stop"))

pool = GraderPool([GraderSpec("PATH:f", {})], 2, 60)
assert [grade.value for grade in pool.grade([item("main"), item("main")])] == [0.0, 0.0]
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
os.setpgid(0, 0)
pool.grade([item("hang"), item("spin")])
"""


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_process_survives_its_rank_and_none_says_a_word(how, path):
    """Ctrl-C goes to the whole foreground group, as here; two graders hang meanwhile, one of them without a pause.

    The script has no `if __name__ == "__main__"`, and is not run in the graders.
    """
    program = textwrap.dedent(SCRIPT).replace("PATH", str(path))
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(pids) == 3
    processes = [psutil.Process(pid) for pid in pids]
    time.sleep(0.3)
    os.killpg(rank.pid, signal.Signals[how])
    _, errors = rank.communicate(timeout=20)
    _, left = psutil.wait_procs(processes, timeout=10)
    assert left == []
    assert errors.count("Traceback") == (1 if how == "SIGINT" else 0), errors
