"""Scaling: GRPO steps of one size on one GPU and on more, with the same work for each rank, in each layout.

    python -m benchmarks.scaling --backends fsdp2 zero3 --engine_types vllm --size 0.5b --layouts 1x1 1x2 2x1

A layout is the engine's tensor-parallel size and how many engines there are; 1x1*2 is two runs of 1x1 at once that know
nothing of each other, each on its own GPU: what they lose to 1x1 is the machine's. Every weight is verified at each
sync. Seconds are medians of the later half of the steps; efficiency is a rank's tokens per second beside that of one
rank alone, where 1x1 came before; waiting is how long ranks wait for the slowest generation, on average. awake and
asleep are what is in use on rank 0's device in a rollout and after it.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.cases import BACKENDS, Row, environment, markdown
from benchmarks.models import SIZES, write_model
from benchmarks.processes import ROOT, run_together
from lightrft.models.loading import load_config

TRAIN = ROOT / "examples/gsm8k_geo3k/train_colocate.py"
FLAGS = shlex.split(
    "--gradient_checkpointing --advantage_estimator group_norm --lr_warmup_steps 0 --actor_learning_rate 1e-6 "
    "--num_episodes 1000 --prompt_max_len 128 --weight_check full --save_steps -1"
)
PHASES = ("generate", "actor", "reference", "train", "sync")
PROMPT_WORDS = 64


@dataclass(frozen=True)
class Layout:
    tp: int
    dp: int
    runs: int = 1
    """At once."""

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Raises ValueError for what is not like 2x1 or 1x1*2."""
        sizes, _, runs = text.partition("*")
        tp, dp = sizes.split("x")
        return cls(int(tp), int(dp), int(runs or 1))

    @property
    def ranks(self) -> int:
        """Of each run."""
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"{self.tp} x {self.dp}" + (f", {self.runs} runs" if self.runs > 1 else "")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=["fsdp2"])
    parser.add_argument("--engine_types", nargs="+", default=["torch"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument(
        "--layouts", nargs="+", type=Layout.parse, default=[Layout(1, 1), Layout(1, 2)], metavar="TPxDP"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=32, help="of each rank and step")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--micro_batch_tokens", type=int, default=16384)
    parser.add_argument("--init_kl_coef", type=float, default=0.01, help="above 0 there is a reference")
    parser.add_argument("--engine_mem_util", type=float, default=0.3)
    parser.add_argument("--enforce_eager", action="store_true", help="without CUDA graphs, which starts faster")
    parser.add_argument("--disable_engine_sleep", action="store_true", help="as engines on a CPU need it")
    parser.add_argument("--fp32", action="store_true", help="instead of bf16 over fp32 master weights")
    parser.add_argument("--flags", default="", help="further ones of train_colocate.py: '--lora_rank 16'")
    parser.add_argument("--case_seconds", type=float, default=600.0, help="a run that takes longer is ended")
    return parser


def main() -> None:
    args = parser().parse_args()
    args.nproc_per_node = max(layout.ranks * layout.runs for layout in args.layouts)
    check_devices(args.nproc_per_node)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        inputs = write_inputs(Path(folder), args, args.nproc_per_node)
        for backend, engine_type in itertools.product(args.backends, args.engine_types):
            alone: Row | None = None
            for layout in args.layouts:
                row = run(backend, engine_type, layout, inputs, args)
                alone = row if layout == Layout(1, 1) else alone
                if alone is not None and "step s" in row and "step s" in alone:
                    row["efficiency"] = per_rank(row, layout) / per_rank(alone, Layout(1, 1))
                sys.stderr.write(f"{json.dumps(row)}\n")
                rows.append(row)
    sys.stdout.write(f"\n{environment(args)}\n\n{markdown(rows)}\n")


def per_rank(row: Row, layout: Layout) -> float:
    rate = row["tokens/s"]
    assert isinstance(rate, float)
    return rate / layout.ranks


def write_inputs(folder: Path, args: argparse.Namespace, max_ranks: int) -> list[str]:
    """Flags for a model with random weights, as many prompts as so many ranks take in a step, and a reward."""
    pretrain = write_model(args.size, folder / "model")
    # A process of its own: this one must hold nothing of a GPU whose memory is measured.
    writer = multiprocessing.get_context("spawn").Process(target=save_weights, args=(pretrain,))
    writer.start()
    writer.join()
    assert writer.exitcode == 0, "the model was not written"
    numbers = torch.Generator().manual_seed(0)
    words = torch.randint(2, 256, (args.prompts * max_ranks, PROMPT_WORDS), generator=numbers).tolist()
    rows = [{"input": " ".join(f"t{word}" for word in row), "label": "0"} for row in words]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "reward.py").write_text("def is_odd(response):\n    return float(len(response) % 2)\n")
    reward = f"{folder / 'reward.py'}:is_odd"
    return ["--pretrain", pretrain, "--prompt_data", str(folder / "prompts.jsonl"), "--reward_fn", reward]


def run(backend: str, engine_type: str, layout: Layout, inputs: Sequence[str], args: argparse.Namespace) -> Row:
    """A row of medians over the later half of the steps, of the first run where there are several."""
    head: Row = {"backend": backend, "engine": engine_type, "size": args.size, "TP x DP": str(layout)}
    with tempfile.TemporaryDirectory() as folder:
        flags = [*run_flags(backend, engine_type, layout, args), *inputs]
        commands = [[str(TRAIN), *flags, "--save_path", f"{folder}/{number}"] for number in range(layout.runs)]
        devices = [{"CUDA_VISIBLE_DEVICES": ",".join(devices_of(number, layout))} for number in range(layout.runs)]
        note = run_together(commands, layout.ranks, args.case_seconds, devices)
        if note is not None:
            return head | {"note": note}
        lines = (Path(folder) / "0/metrics.jsonl").read_text().splitlines()
    return head | summary([step for step in map(json.loads, lines) if "time/step" in step])


def save_weights(pretrain: str) -> None:
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        hf_config = load_config(pretrain, "auto").hf_config
        AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16).save_pretrained(pretrain)


def visible_devices() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(torch.cuda.device_count())] if given is None else list(filter(None, given.split(",")))


def check_devices(count: int) -> None:
    """Raises ValueError where there are GPUs, and fewer than so many."""
    if 0 < (found := len(visible_devices())) < count:
        raise ValueError(f"the largest of the layouts takes {count} GPUs, and {found} are visible: choose others.")


def devices_of(run: int, layout: Layout) -> list[str]:
    """GPUs of one of several runs at once; none where there are none."""
    return visible_devices()[run * layout.ranks : (run + 1) * layout.ranks]


def summary(steps: Sequence[Mapping[str, float]]) -> Row:
    later = steps[len(steps) // 2 :]
    row: Row = {
        "steps": str(len(steps)),
        "verified": f"{min(step['sync/verified_weights'] for step in steps):.0f}",
        "mismatch": max(step["rollout/log_prob_mismatch"] for step in steps),
        "step s": statistics.median(step["time/step"] for step in later),
    }
    for phase in PHASES:
        if f"time/{phase}" in later[0]:
            row[phase] = statistics.median(step[f"time/{phase}"] for step in later)
    row["waiting"] = statistics.median(step["time/generate_waiting"] for step in later)
    row["tokens/s"] = statistics.median(step["tokens_per_second"] for step in later)
    last = steps[-1]
    return row | {"awake GiB": last["memory/generate_peak_gib"], "asleep GiB": last["memory/generate_exit_gib"]}


def run_flags(backend: str, engine_type: str, layout: Layout, args: argparse.Namespace) -> list[str]:
    prompts = args.prompts * layout.ranks
    flags = {
        "engine_type": engine_type,
        "engine_tp_size": layout.tp,
        "engine_mem_util": args.engine_mem_util,
        "rollout_batch_size": prompts,
        "n_samples_per_prompt": args.samples,
        "train_batch_size": prompts * args.samples,
        "generate_max_len": args.new_tokens,
        "max_tokens_per_micro_batch": args.micro_batch_tokens,
        "init_kl_coef": args.init_kl_coef,
        "max_steps": args.steps,
    }
    switches = [] if args.fp32 else ["--bf16"]
    switches += [f"--{name}" for name in ("enforce_eager", "disable_engine_sleep") if getattr(args, name)]
    backend_flags = (
        ["--fsdp"] if "fsdp" in BACKENDS[backend] else ["--zero_stage", str(BACKENDS[backend]["zero_stage"])]
    )
    values = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [*FLAGS, *switches, *backend_flags, *values, *shlex.split(args.flags)]


if __name__ == "__main__":
    main()
