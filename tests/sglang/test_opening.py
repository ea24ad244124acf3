"""A scheduler that ends between being told to open its weights and calling the rank, on SGLang's stand-in."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.sglang.calls import wait_until_gone
from tests.sglang.engines import IS_REAL, engine_of
from tests.strategy.engine_conformance import load, reference, tiny_qwen2


@pytest.mark.skipif(IS_REAL, reason="is of the tests' own package; tests/gpu kills SGLang's")
def test_a_scheduler_that_ends_before_it_opens_its_weights_is_named_at_once(tmp_path: Path) -> None:
    """It is held up first, so that it cannot call; the rank learns of it from the host, and nothing is left."""
    made = reference(tiny_qwen2(), tmp_path)
    engine = engine_of(made)
    [pid] = engine.pids
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"SGLang has ended: its process .*pid {pid}\) has ended with exit code -9"):
        load(engine, made.model)
    assert time.monotonic() - started < 5
    assert wait_until_gone([engine.host.pid, pid]) == []
    engine.close()
