"""How SGLang's processes end: with their rank, and never without a word. On a package that stands for SGLang."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrft.strategy.sglang_utils import library
from lightrft.strategy.sglang_utils.host import EngineHost, host_environment
from lightrft.strategy.sglang_utils.media import EngineInput
from lightrft.strategy.sglang_utils.requests import request_params
from lightrft.types import SamplingParams
from tests import tiny_models
from tests.sglang import calls
from tests.sglang.engines import IS_REAL

pytestmark = pytest.mark.skipif(IS_REAL, reason="is of the tests' own package; tests/gpu kills SGLang's")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_models.save_model(folder, tiny_models.qwen2(eos_token_id=None))
    return folder


@pytest.fixture
def host(folder: Path) -> Iterator[EngineHost]:
    """One to end."""
    host = calls.start_host(folder)
    yield host
    host.close()


@pytest.fixture(scope="module")
def lasting(folder: Path) -> Iterator[tuple[EngineHost, list[int]]]:
    """One that stays, and SGLang's processes."""
    host = calls.start_host(folder)
    description = host.wait_for_start()
    assert description["num_tokens"] == 5000
    yield host, description["pids"]
    host.close()
    assert calls.wait_until_gone([host.pid, *description["pids"]], 0.0) == []


def test_calls_are_answered_and_their_errors_are_the_rank_s(lasting: tuple[EngineHost, list[int]]) -> None:
    host, _ = lasting
    with pytest.raises(RuntimeError, match=r"SGLang failed:(.|\n)*LookupError: what a call did"):
        host.call(calls.raise_here)
    host.call(calls.wait, 0.0)


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    host = calls.start_host(tmp_path)
    with pytest.raises(
        RuntimeError,
        match=r"SGLang (failed|has ended)(.|\n)*--mem-fraction-static in its messages is --engine_mem_util",
    ):
        host.wait_for_start()
    host.close()


def test_a_scheduler_that_is_killed_ends_the_call_with_its_name(host: EngineHost) -> None:
    [pid] = host.wait_for_start()["pids"]
    started = time.monotonic()
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(RuntimeError, match=rf"SGLang has ended: its process .*pid {pid}\) has ended with exit code -9"):
        host.call(calls.wait, 60.0)
    assert time.monotonic() - started < 10
    assert calls.wait_until_gone([host.pid, pid]) == []


def test_a_scheduler_that_fails_ends_the_call(host: EngineHost) -> None:
    """It prints its traceback, and tells its parent alone by a signal."""
    [pid] = host.wait_for_start()["pids"]
    with pytest.raises(RuntimeError, match="SGLang has ended: a process of it has failed, as it says above"):
        host.call(calls.fail)
    assert calls.wait_until_gone([host.pid, pid]) == []
    with pytest.raises(RuntimeError, match="SGLang has ended"):
        host.call(calls.wait, 0.0)


def test_nothing_is_left_when_the_rank_is_killed(folder: Path) -> None:
    """In the middle of a call."""
    command = [sys.executable, "-m", "tests.sglang.calls", str(folder)]
    rank = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pids = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(pids) == 2 and calls.wait_until_gone(pids, 0.5) == pids
    rank.kill()
    rank.wait()
    assert calls.wait_until_gone(pids) == []


def test_signals_to_all_processes_of_a_job_are_the_ranks_to_answer(lasting: tuple[EngineHost, list[int]]) -> None:
    """A terminal's Ctrl-C does not reach another session; a cluster's SIGTERM does."""
    host, [pid] = lasting
    assert os.getsid(host.pid) == host.pid == os.getpgid(pid)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.killpg(host.pid, number)
    host.call(calls.wait, 0.5)
    assert calls.wait_until_gone([pid], 0.0) == [pid]


def test_an_engine_does_not_believe_itself_a_rank(lasting: tuple[EngineHost, list[int]]) -> None:
    """With torchrun's store, SGLang's group would wait for ranks that never come."""
    host, _ = lasting
    outer = {"RANK": "3", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0", "HOME": "/h"}
    inner = host_environment(outer)
    assert inner == {"HOME": "/h", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    assert not {"RANK", "WORLD_SIZE"} & host.call(calls.environment).keys()
    assert "NCCL_CUMEM_ENABLE" not in os.environ, "what SGLang sets stays in its process"


def test_outputs_come_as_ids_and_log_probs(lasting: tuple[EngineHost, list[int]]) -> None:
    """Of as many requests as there are, whichever prompts they are of."""
    host, _ = lasting
    inputs = [EngineInput([5, 6], {}), EngineInput([7], {})]
    requests = [(i, request_params(SamplingParams(max_new_tokens=3), seed)) for i, seed in ((1, 1), (0, 2), (1, 2))]
    found = host.call(library.generate, inputs, requests, True)
    assert [(len(each.ids), len(each.log_probs), each.finish_reason) for each in found] == [(3, 3, "length")] * 3
    assert [each.num_prompt_tokens for each in found] == [1, 2, 1]
    assert host.call(library.generate, inputs, requests[:1], False)[0].log_probs is None
