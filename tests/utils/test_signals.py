"""Stop signals, most in processes of their own."""

import os
import signal
import subprocess
import sys
import time

import pytest

from lightrft.utils.signals import StopSignals

PROGRAM = """
import ctypes, os, signal, sys, time
from lightrft.utils.signals import StopSignals

with StopSignals() as signals:
    print("ready", flush=True)
    while not signals.received:
        time.sleep(0.01)
    print(f"noted {signals.received}", flush=True)
    if sys.argv[1] == "hang":
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
print("left", signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
"""


@pytest.fixture
def start():
    processes = []

    def start(how):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_is_noted_and_nothing_ends(start, number):
    process = start("go on")
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert out == f"noted {number.value}\nleft True\n"
    assert f"{number.name}: the run ends after this step" in err
    assert process.returncode == 0


def test_a_signal_right_before_the_end_is_told_too(caplog):
    for _ in range(30):
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
    assert [record.getMessage()[:8] for record in caplog.records] == ["SIGTERM:"] * 30


def test_a_second_signal_ends_a_process_that_hangs_in_c(start):
    process = start("hang")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "noted 15\n"
    # At once it counts as the same one: a terminal and torchrun may both deliver it.
    process.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=5)
    assert "ERROR: a second SIGINT ends this process now." in err
    assert process.returncode == 128 + signal.SIGINT
