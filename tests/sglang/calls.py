"""What tests call in the host's process, beside what the adapter calls, and ranks that they end."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from lightrft.strategy.sglang_utils import library
from lightrft.strategy.sglang_utils.host import EngineHost
from lightrft.strategy.sglang_utils.preconditions import engine_arguments
from tests.sglang.engines import use_sglang


def start_host(folder: Path, tp_size: int = 1) -> EngineHost:
    """Of the package that stands for SGLang."""
    import torch

    use_sglang()
    return EngineHost(
        engine_arguments(
            folder,
            dtype=torch.float32,
            mem_util=0.1,
            max_model_len=64,
            sleeps=True,
            tp_size=tp_size,
            device="cpu",
            first_gpu=0,
            gpu_bytes=0,
            port=1,
            enforce_eager=True,
            takes_stop_strings=False,
            timeout_seconds=60,
        )
    )


def wait(engine: library.Engine, seconds: float) -> None:
    """Keeps a scheduler busy."""
    engine.ask("wait", seconds)


def fail(engine: library.Engine) -> None:
    """Raises in a scheduler."""
    engine.ask("fail")


def raise_here(engine: library.Engine) -> None:
    raise LookupError("what a call did")


def environment(engine: library.Engine) -> dict[str, str]:
    return dict(os.environ)


def wait_until_gone(pids: Sequence[int], seconds: float = 10.0) -> list[int]:
    """Those that are still there then; a zombie is gone."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


def main(folder: Path) -> None:
    """A rank that starts SGLang, says its processes' ids, has it work, and never asks how it went."""
    # The host knows a function by its module, and this one is another's main module there.
    from tests.sglang import calls

    host = start_host(folder)
    pids = host.wait_for_start()["pids"]
    host.begin(calls.wait, 600.0)
    print(host.pid, *pids, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
