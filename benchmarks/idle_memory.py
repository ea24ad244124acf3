"""Idle memory: what is in use on a GPU as a run starts, draws and falls asleep, in each layout of the engines.

    python -m benchmarks.idle_memory --engine_types vllm sglang --layouts 1x1 1x2 2x1

MiB of rank 0's device, of all processes. The actor is gone in the end: what is left is CUDA's contexts, NCCL's
communicators and what the engine keeps, with SGLang its weights. Layouts differ by their groups.
"""

import argparse
import gc
import itertools
import json
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import rollout
from benchmarks.cases import Case, Row, Setup, environment, markdown, start_strategy
from benchmarks.models import SIZES, load_random, write_model
from benchmarks.processes import run_together
from benchmarks.scaling import Layout, check_devices, devices_of
from lightrft.config.arguments import EngineType
from lightrft.models.actor import Actor
from lightrft.models.loading import load_tokenizer
from lightrft.strategy.utils.devices import empty_cache
from lightrft.types import SamplingParams

MIB = 2**20


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--engine_types", nargs="+", default=["torch"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--layouts", nargs="+", type=Layout.parse, default=[Layout(1, 1)], metavar="TPxDP")
    parser.add_argument("--engine_mem_util", type=float, default=0.2)
    parser.add_argument("--enforce_eager", action="store_true", help="without CUDA graphs, which take memory too")
    parser.add_argument("--disable_engine_sleep", action="store_true", help="as engines on a CPU need it")
    parser.add_argument("--fp32", action="store_true", help="instead of bf16")
    parser.add_argument("--case_seconds", type=float, default=600.0, help="a run that takes longer is ended")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(backends=["fsdp2"], prompts=16, samples=4, prompt_tokens=64, new_tokens=32)
    return parser


def main() -> None:
    args = parser().parse_args()
    if args.rows is not None:
        measure(args.engine_types[0], args.layouts[0], args)
        return
    args.nproc_per_node = max(layout.ranks for layout in args.layouts)
    check_devices(args.nproc_per_node)
    cases = itertools.product(args.engine_types, args.layouts)
    rows = [run(engine_type, layout, args) for engine_type, layout in cases]
    sys.stdout.write(f"\n{environment(args)}\n\n{markdown(rows)}\n")


def run(engine_type: str, layout: Layout, args: argparse.Namespace) -> Row:
    """In processes of its own, on GPUs that hold nothing of this one."""
    row: Row = {"engine": engine_type, "size": args.size, "TP x DP": str(layout)}
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "row.json"
        own = ["--engine_types", engine_type, "--layouts", f"{layout.tp}x{layout.dp}", "--rows", str(written)]
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(devices_of(0, layout))}
        command = ["-m", "benchmarks.idle_memory", *sys.argv[1:], *own]
        note = run_together([command], layout.ranks, args.case_seconds, [devices])
        return row | (json.loads(written.read_text()) if note is None else {"note": note})


def measure(engine_type: EngineType, layout: Layout, args: argparse.Namespace) -> None:
    """In a rank: writes rank 0's row."""
    found: Row = {}

    def look(stage: str) -> None:
        gc.collect()
        empty_cache(device)
        found[stage] = in_use(device)

    args.engine_tp_size = layout.tp
    with tempfile.TemporaryDirectory() as folder:
        pretrain = write_model(args.size, Path(folder))
        strategy = start_strategy(Case(engine_type, args.size), "fsdp2", args, [rollout.BENCHMARK], pretrain)
        device = strategy.device
        look("groups joined")
        strategy.collectives.all_reduce(torch.ones(MIB, device=device))
        look("first all-reduce")
        engine = strategy.create_engine(load_tokenizer(pretrain))
        look("engine created")
        strategy.sleep_engine()
        look("engine asleep")
        loaded = load_random(pretrain)
        actor = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=True)
        strategy.update_engine_weights(actor)
        engine.wake_up()
        look("awake")
        prompts = rollout.make_prompts(Setup(strategy, engine, actor, loaded.layout, engine_type, True), args)
        seeds = [[args.samples * i + j for j in range(args.samples)] for i in range(len(prompts))]
        strategy.gather_and_generate(prompts, SamplingParams(max_new_tokens=args.new_tokens), seeds)
        look("after a rollout")
        strategy.sleep_engine()
        look("asleep again")
        del actor
        look("without the actor")
        if strategy.is_rank_0:
            args.rows.write_text(json.dumps(found))
        strategy.close()


def in_use(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    free, size = torch.cuda.mem_get_info(device)
    return (size - free) / MIB


if __name__ == "__main__":
    main()
