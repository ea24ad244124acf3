"""Runs that are stopped and resumed, and what they must have in common with unbroken ones."""

import contextlib
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightrft.config import Config
from lightrft.trainer import build_trainer
from tests.distributed.runs import make_config, read

USER_CODE = """
import os, signal, sys, threading, time

from torch.distributed.elastic.multiprocessing.errors import record
from lightrft.config import parse_config
from lightrft.trainer import build_trainer


def send(*numbers):
    for number in numbers:
        os.kill(os.getppid(), number)
        time.sleep(2)


@record
def main():
    trainer = build_trainer(parse_config())
    train_step = trainer.train_step

    def signalled(step, rows):
        if step == 3 and os.environ["RANK"] == "0":
            numbers = [int(number) for number in os.environ["SIGNALS"].split()]
            threading.Thread(target=send, args=numbers, daemon=True).start()
            time.sleep(float(os.environ["SECONDS"]))
        return train_step(step, rows)

    trainer.train_step = signalled
    trainer.fit()


if __name__ == "__main__":
    main()
"""
"""A training whose torchrun gets SIGNALS while step 3 lasts SECONDS longer."""
STEPS = {"max_steps": None, "num_episodes": 3}
"""8 prompts in batches of 4 are 2 steps an episode, 6 in all."""
COSINE = {"lr_scheduler": "cosine", "lr_warmup_steps": 2}


def six_steps(task: Path, save_path: Path, **owners: dict[str, Any]) -> Config:
    """Six steps in three episodes, with a checkpoint at the end."""
    changes: dict[str, dict[str, Any]] = {
        "data": {"max_samples": 8},
        "train": STEPS,
        "optimizer": COSINE,
        "checkpoint": {"ckpt_path": str(save_path / "ckpt")},
    }
    for owner, change in owners.items():
        changes[owner] = changes.get(owner, {}) | change
    return make_config(task, save_path, **changes)


def run(config: Config, stop_after: int = 0, rank: int = 1, number: int = signal.SIGTERM) -> int:
    """Exit code of a run, in which one rank gets a signal during that step."""
    trainer = build_trainer(config)
    train_step = trainer.train_step

    def signalled(step, rows):
        if step == stop_after and trainer.strategy.rank == rank:
            os.kill(os.getpid(), number)
        return train_step(step, rows)

    trainer.train_step = signalled
    try:
        trainer.fit()
    except SystemExit as stop:
        assert isinstance(stop.code, int)
        return stop.code
    return 0


def logged(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What a function returned, and what was logged meanwhile."""
    with contextlib.redirect_stderr(io.StringIO()) as log:
        value = function(*args)
    return value, log.getvalue()


def logged_run(*args: Any) -> tuple[int, str]:
    return logged(run, *args)


def history(config: Config) -> list[dict[str, float]]:
    """metrics.jsonl without what depends on the machine and the number of ranks."""
    machine = ("time/", "sync/", "memory/", "tokens_per", "checkpoint/", "train/micro_batches")
    return [{k: v for k, v in line.items() if not k.startswith(machine)} for line in read(config, "metrics.jsonl")]


def prompts_and_responses(config: Config) -> list[tuple]:
    return [(r["step"], r["group"], r["index"], r["row"], r["response"]) for r in read(config, "samples.jsonl")]


def assert_same(config: Config, expected: Config, tolerance: float = 1e-6) -> None:
    assert prompts_and_responses(config) == prompts_and_responses(expected)
    for line, wanted in zip(history(config), history(expected), strict=True):
        assert line == pytest.approx(wanted, abs=tolerance)


def names(config: Config) -> list[str]:
    return sorted(path.name for path in Path(str(config.checkpoint.ckpt_path)).iterdir())
