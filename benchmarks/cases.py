"""Cases: each engine and size of a benchmark in torchrun processes of its own, with each backend, and tables of all."""

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks.models import SIZES, load_random, write_model
from benchmarks.processes import run_together
from lightrft.config import Config, DataConfig, ModelConfig, RolloutConfig, StrategyConfig
from lightrft.config.arguments import EngineType
from lightrft.models.actor import Actor
from lightrft.models.collate import Layout
from lightrft.models.loading import load_tokenizer
from lightrft.strategy.engine import ManagedEngine
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.devices import empty_cache

Row: TypeAlias = dict[str, float | str | None]

BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp": True},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
}


@dataclass(frozen=True)
class Case:
    """One start of an engine, which each backend gives its weights in turn."""

    engine_type: EngineType
    size: str


@dataclass(frozen=True)
class Setup:
    """Strategy, engine and actor with random weights, before this backend's first weight sync."""

    strategy: StrategyBase
    engine: ManagedEngine
    actor: nn.Module
    layout: Layout
    engine_type: str
    computes: bool
    """Whether the actor can run a forward pass."""


@dataclass(frozen=True)
class Benchmark:
    """What is measured of each case and backend: the row of a table."""

    title: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    configure: Callable[[Config, argparse.Namespace], Config]
    """The configuration with what it asks of the run."""
    measure: Callable[[Setup, argparse.Namespace], Row]


def main(module: str, benchmarks: Sequence[Benchmark]) -> None:
    """Runs the cases that the command line asks for, or, as a rank of one of them, measures it."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["fsdp2"])
    parser.add_argument("--engine_types", nargs="+", default=["torch"])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny"])
    parser.add_argument("--nproc_per_node", type=int, default=1)
    parser.add_argument("--engine_mem_util", type=float, default=0.4)
    parser.add_argument("--engine_tp_size", type=int, default=1)
    parser.add_argument("--enforce_eager", action="store_true", help="without CUDA graphs, which starts faster")
    parser.add_argument("--disable_engine_sleep", action="store_true", help="as engines on a CPU need it")
    parser.add_argument("--fp32", action="store_true", help="instead of bf16 over fp32 master weights")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts")
    parser.add_argument("--case_seconds", type=float, default=900.0, help="a case that takes longer is ended")
    parser.add_argument(
        "--zero_without_optimizer",
        action="store_true",
        help="DeepSpeed takes Adam's state at once, 16 bytes a weight in all: for models of which it does not fit. The "
        "actor computes nothing then",
    )
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    for benchmark in benchmarks:
        benchmark.add_flags(parser)
    args = parser.parse_args()
    if args.rows is not None:
        measure_case(Case(args.engine_types[0], args.sizes[0]), args, benchmarks)
        return
    tables: dict[str, list[Row]] = {benchmark.title: [] for benchmark in benchmarks}
    for case in itertools.product(args.engine_types, args.sizes):
        for title, rows in run(module, Case(*case), args, list(tables)).items():
            tables[title] += rows
            # A later case may take the whole run with it.
            sys.stderr.write("".join(f"{json.dumps(row)}\n" for row in rows))
    sys.stdout.write(f"\n{environment(args)}\n")
    for title, rows in tables.items():
        sys.stdout.write(f"\n{title}\n\n{markdown(rows)}\n")


def run(module: str, case: Case, args: argparse.Namespace, titles: Sequence[str]) -> dict[str, list[Row]]:
    """The case's rows by table, measured in processes of its own: an engine leaves memory behind."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "rows.jsonl"
        # The last of a repeated flag counts.
        own = ["--engine_types", case.engine_type, "--sizes", case.size, "--rows", str(written)]
        note = run_together([["-m", module, *sys.argv[1:], *own]], args.nproc_per_node, args.case_seconds)
        if note is not None:
            sys.stderr.write(f"{case.engine_type} {case.size}: {note}\n")
        lines = written.read_text().splitlines() if written.is_file() else []
    found = {(title, row["backend"]): row for title, row in map(json.loads, lines)}
    return {
        title: [found.get((title, name), head(case, name, args) | {"note": note}) for name in args.backends]
        for title in titles
    }


def head(case: Case, backend: str, args: argparse.Namespace) -> Row:
    ranks = args.nproc_per_node
    layout = f"{args.engine_tp_size} x {ranks // args.engine_tp_size}"
    return {"backend": backend, "engine": case.engine_type, "size": case.size, "TP x DP": layout}


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


def measure_case(case: Case, args: argparse.Namespace, benchmarks: Sequence[Benchmark]) -> None:
    """Appends a line for each backend and benchmark to `args.rows`, of rank 0, as soon as it is known."""
    with tempfile.TemporaryDirectory() as folder:
        pretrain = write_model(case.size, Path(folder))
        # The engine outlives the strategies that it is measured with.
        host = start_strategy(case, "fsdp2", args, benchmarks, pretrain)
        # Engines measure what memory is free, so theirs comes first.
        engine = host.create_engine(load_tokenizer(pretrain))
        for backend in args.backends:
            for title, row in measure_backend(case, backend, engine, args, benchmarks, pretrain):
                if host.is_rank_0:
                    with args.rows.open("a") as file:
                        file.write(json.dumps([title, head(case, backend, args) | row]) + "\n")
            # The next backend's actor wants the memory of this one's.
            gc.collect()
            empty_cache(host.device)
        host.close()


def start_strategy(
    case: Case, backend: str, args: argparse.Namespace, benchmarks: Sequence[Benchmark], pretrain: str
) -> StrategyBase:
    config = Config(
        ModelConfig(pretrain, bf16=not args.fp32),
        DataConfig("unused"),
        RolloutConfig(
            engine_type=case.engine_type,
            engine_mem_util=args.engine_mem_util,
            engine_tp_size=args.engine_tp_size,
            enforce_eager=args.enforce_eager,
            enable_engine_sleep=not args.disable_engine_sleep,
        ),
        strategy=StrategyConfig(**BACKENDS[backend]),
    )
    for benchmark in benchmarks:
        config = benchmark.configure(config, args)
    strategy = get_strategy(config)
    strategy.setup_distributed()
    return strategy


def measure_backend(
    case: Case,
    backend: str,
    engine: ManagedEngine,
    args: argparse.Namespace,
    benchmarks: Sequence[Benchmark],
    pretrain: str,
) -> Iterator[tuple[str, Row]]:
    """Its row for each table, by the table's title."""
    strategy = start_strategy(case, backend, args, benchmarks, pretrain)
    strategy.use_engine(engine)
    loaded = load_random(pretrain)
    actor = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=True)
    computes = strategy.config.strategy.fsdp or not args.zero_without_optimizer
    if computes:
        actor = strategy.prepare_optimizer("actor", actor, learning_rate=1e-6, num_steps=1).model
    setup = Setup(strategy, engine, actor, loaded.layout, case.engine_type, computes)
    for benchmark in benchmarks:
        yield benchmark.title, benchmark.measure(setup, args)
    strategy.sleep_engine()
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
