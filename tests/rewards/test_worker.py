import asyncio
import gc
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from lightrft.rewards.functions import RewardFunction
from lightrft.rewards.records import Grade, RewardInput
from lightrft.rewards.worker import RewardWorker

SAMPLES = [RewardInput(f"prompt {i}", f"response {i}", i, None, {}, i, "stop") for i in range(2)]


def submit(worker: RewardWorker, function: Callable[..., Any]) -> list[Grade]:
    reward = RewardFunction("mine:f", function)
    return worker.submit(lambda runner: reward.grade(SAMPLES, runner)).result(timeout=10)


def test_an_async_lock_and_queue_of_a_users_module_serve_every_call():
    """Both are bound to the loop that first waits for them; under another they raise RuntimeError."""
    lock = asyncio.Lock()
    slots = asyncio.Queue()
    loops = set()

    async def reward(response, label):
        loops.add(asyncio.get_running_loop())
        async with lock:
            await asyncio.sleep(0)
        if label == 0:
            return await slots.get()
        await asyncio.sleep(0.01)
        await slots.put(5)
        return 1

    worker = RewardWorker()
    for _ in range(3):
        assert submit(worker, reward) == [Grade(5.0), Grade(1.0)]
    assert len(loops) == 1


def test_a_connection_and_a_thread_local_made_in_the_first_call_serve_the_next():
    """SQLite refuses a connection in any thread but its own."""
    local = threading.local()

    def reward(responses):
        if "table" not in vars(local):
            local.table = sqlite3.connect(":memory:")
        return [local.table.execute("select 2").fetchone()[0] for _ in responses]

    worker = RewardWorker()
    for _ in range(2):
        assert submit(worker, reward) == [Grade(2.0)] * 2


def test_a_plain_function_may_run_a_loop_of_its_own_between_async_ones():
    async def one():
        await asyncio.sleep(0)
        return 1

    async def asynchronous(response):
        return await one()

    worker = RewardWorker()
    for function in (asynchronous, lambda response: asyncio.run(one()), asynchronous):
        assert submit(worker, function) == [Grade(1.0)] * 2


def test_what_a_function_raises_is_the_futures_and_the_worker_goes_on():
    def out_of_memory(response):
        raise MemoryError

    def plain_exit(response):
        sys.exit(3)

    async def async_exit(response):
        sys.exit(3)

    worker = RewardWorker()
    with pytest.raises(MemoryError):
        submit(worker, out_of_memory)
    for function in (plain_exit, async_exit):
        with pytest.raises(RuntimeError, match=r"the reward function ended its thread by SystemExit\(3\)"):
            submit(worker, function)
    assert submit(worker, lambda response: 1) == [Grade(1.0)] * 2


def test_the_thread_ends_with_the_worker_and_closes_its_loop():
    seen = []

    async def reward(responses):
        seen.extend([threading.current_thread(), asyncio.get_running_loop()])
        return [1, 1]

    worker = RewardWorker()
    submit(worker, reward)
    thread, loop = seen
    assert thread.is_alive() and not loop.is_closed()
    del worker
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive() and loop.is_closed()


@pytest.mark.parametrize("hang", ["time.sleep(600)", "runner.run(asyncio.sleep(600))"])
def test_a_function_that_hangs_does_not_keep_a_dying_process_alive(hang):
    program = f"""
        import asyncio, threading, time
        from lightrft.rewards.worker import RewardWorker

        def job(runner):
            started.set()
            {hang}

        started = threading.Event()
        worker = RewardWorker()
        pending = worker.submit(job)
        started.wait()
        raise KeyError("dying")
    """
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - start < 30
    assert ended.returncode == 1 and ended.stderr.endswith("KeyError: 'dying'\n")
