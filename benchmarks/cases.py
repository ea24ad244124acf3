"""Cases: each backend, engine and size of a benchmark in torchrun processes of its own, and a table of all of them."""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks.models import SIZES, load_random, write_model
from lightrft.config import Config, DataConfig, ModelConfig, StrategyConfig
from lightrft.models.actor import Actor
from lightrft.models.collate import Layout
from lightrft.models.loading import load_tokenizer
from lightrft.strategy.engine import ManagedEngine
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.strategy_base import StrategyBase

Row: TypeAlias = dict[str, float | str | None]

ROOT = Path(__file__).parents[1]
BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp": True},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
}


@dataclass(frozen=True)
class Case:
    backend: str
    engine_type: str
    size: str


def main(module: str, measure: Callable[[Case, argparse.Namespace], Row], add_flags: Callable[..., None]) -> None:
    """Runs the cases that the command line asks for, or, as a rank of one of them, measures it."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["fsdp2"])
    parser.add_argument("--engine_types", nargs="+", default=["torch"])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny"])
    parser.add_argument("--nproc_per_node", type=int, default=1)
    parser.add_argument("--engine_mem_util", type=float, default=0.4)
    parser.add_argument("--engine_tp_size", type=int, default=1)
    parser.add_argument("--enforce_eager", action="store_true", help="without CUDA graphs, which starts faster")
    parser.add_argument("--fp32", action="store_true", help="instead of bf16 over fp32 master weights")
    parser.add_argument("--case_seconds", type=float, default=600.0, help="a case that takes longer is ended")
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)
    add_flags(parser)
    args = parser.parse_args()
    if args.row is not None:
        row = measure(Case(args.backends[0], args.engine_types[0], args.sizes[0]), args)
        if os.environ["RANK"] == "0":
            args.row.write_text(json.dumps(row))
        return
    rows: list[Row] = []
    for case in itertools.product(args.backends, args.engine_types, args.sizes):
        rows.append(run(module, Case(*case), args))
        # A later case may take the whole run with it.
        sys.stderr.write(f"{json.dumps(rows[-1])}\n")
    sys.stdout.write(f"\n{environment(args)}\n\n{markdown(rows)}\n")


def run(module: str, case: Case, args: argparse.Namespace) -> Row:
    """The row of a case, measured in processes of its own: an engine leaves memory behind."""
    head: Row = {"backend": case.backend, "engine": case.engine_type, "size": case.size}
    with tempfile.TemporaryDirectory() as folder:
        row = Path(folder) / "row.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc_per_node", str(args.nproc_per_node), "-m", module, *sys.argv[1:]]
        # The last of a repeated flag counts.
        command += ["--backends", case.backend, "--engine_types", case.engine_type, "--sizes", case.size]
        command += ["--row", str(row)]
        try:
            ended = subprocess.run(command, cwd=ROOT, timeout=args.case_seconds)
        except subprocess.TimeoutExpired:
            return head | {"note": f"over {args.case_seconds:.0f} s"}
        if ended.returncode or not row.is_file():
            return head | {"note": f"failed ({ended.returncode})"}
        return head | json.loads(row.read_text())


def environment(args: argparse.Namespace) -> str:
    """What the table was measured with."""
    packages = ["torch", "transformers", *(name for name in args.engine_types if name != "torch")]
    packages += ["deepspeed"] if any(backend.startswith("zero") for backend in args.backends) else []
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    dtype = "fp32" if args.fp32 else "bf16"
    return f"{time.strftime('%Y-%m-%d')}, {args.nproc_per_node} x {device}, {dtype}, {versions}"


def markdown(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in rows)])


def _cell(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# In a rank


@dataclass(frozen=True)
class Setup:
    strategy: StrategyBase
    engine: ManagedEngine
    actor: nn.Module
    layout: Layout


@contextmanager
def set_up(
    case: Case, args: argparse.Namespace, rollout: Mapping[str, Any], data: Mapping[str, Any]
) -> Iterator[Setup]:
    """Strategy, engine and actor with random weights, before their first weight sync."""
    with tempfile.TemporaryDirectory() as folder:
        pretrain = write_model(case.size, Path(folder))
        config = Config(
            ModelConfig(pretrain, bf16=not args.fp32),
            DataConfig("unused", **data),
            strategy=StrategyConfig(**BACKENDS[case.backend]),
        )
        options = {"engine_type": case.engine_type, "engine_mem_util": args.engine_mem_util}
        options |= {"engine_tp_size": args.engine_tp_size, "enforce_eager": args.enforce_eager}
        config = replace(config, rollout=replace(config.rollout, **options | dict(rollout)))
        strategy = get_strategy(config)
        strategy.setup_distributed()
        # Engines measure what memory is free, so theirs comes first.
        engine = strategy.create_engine(load_tokenizer(pretrain))
        loaded = load_random(pretrain)
        model = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=True)
        actor = strategy.prepare_optimizer("actor", model, learning_rate=1e-6, num_steps=1).model
        yield Setup(strategy, engine, actor, loaded.layout)
        strategy.close()


def seconds(strategy: StrategyBase, work: Callable[[], object], repeats: int = 1) -> float:
    """Wall seconds of the slowest rank until the device is done, the median of the repeats."""
    return statistics.median(_once(strategy, work) for _ in range(repeats))


def _once(strategy: StrategyBase, work: Callable[[], object]) -> float:
    strategy.collectives.barrier()
    _synchronize(strategy.device)
    started = time.perf_counter()
    work()
    _synchronize(strategy.device)
    [slowest] = strategy.collectives.all_reduce_max([time.perf_counter() - started])
    return slowest


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def extra_bytes(device: torch.device, work: Callable[[], object]) -> int | None:
    """What `work` takes on the device at its peak, beyond what is there; None on the host."""
    if device.type != "cuda":
        work()
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before
