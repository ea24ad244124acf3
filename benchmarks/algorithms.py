"""Algorithms: the addition example with every estimator and policy loss, as curves and a page.

    python examples/addition/prepare.py --output runs/addition-data
    python -m benchmarks.algorithms --runs runs/algorithms --steps 100 --seeds 0 1 2

Each run is a torchrun of its own, a step of 64 prompts with 8 answers, and leaves its folder under --runs: one that
has finished is not run again. The pictures and `algorithms.md` go to --output.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.cases import environment
from benchmarks.processes import ROOT
from lightrft.config.arguments import ADVANTAGE_NAMES, POLICY_LOSS_NAMES
from lightrft.utils.plots import Course, course, moving_average

TRAIN, CONFIG = ROOT / "examples" / "addition" / "train.py", ROOT / "examples" / "addition" / "addition.yaml"
AVERAGED = 10
"""Steps in a curve's moving average."""
ONE_UPDATE = ("--actor_learning_rate", "3e-4")
FOUR_UPDATES = ("--train_batch_size", "128", "--micro_train_batch_size", "128", "--actor_learning_rate", "1e-4")
"""Four optimizer steps a rollout, so that ratios leave 1 and losses differ."""
TEACHER = "{runs}/estimators/group_norm-{seed}/model"
"""What a run before has made of the example's model."""


@dataclass(frozen=True)
class Case:
    """One algorithm: its name, and its flags beside those of the example."""

    name: str
    flags: tuple[str, ...]


def estimator_case(name: str) -> Case:
    more = {"gae": ("--critic_learning_rate", "3e-4"), "on_policy_distillation": ("--teacher_pretrain", TEACHER)}
    return Case(name, ("--advantage_estimator", name, *more.get(name, ()), *ONE_UPDATE))


LOSS_FLAGS: Mapping[str, tuple[str, ...]] = {
    "gspo": ("--eps_clip", "0.003", "--eps_clip_high", "0.004"),
    "gmpo": ("--eps_clip", "0.4"),
    "cpgd": ("--policy_drift_coef", "0.01"),
    "cispo": ("--eps_clip", "1.0", "--eps_clip_high", "0.28"),
}
"""Clip ranges of the papers, where PPO's is not theirs; GSPO's is ten times wider, for answers of four tokens."""
DAPO_FLAGS = (
    *("--eps_clip_high", "0.28", "--dynamic_sampling"),
    # A right answer is at most four tokens, so the penalty is for what is longer.
    *("--generate_max_len", "6", "--overlong_buffer", "--overlong_buffer_len", "2"),
)

ESTIMATORS = [estimator_case(name) for name in ADVANTAGE_NAMES]
LOSSES = [Case(name, ("--policy_loss", name, *LOSS_FLAGS.get(name, ()), *FOUR_UPDATES)) for name in POLICY_LOSS_NAMES]
ALGORITHMS = [
    Case("GRPO", ("--advantage_estimator", "group_norm", *ONE_UPDATE)),
    Case("GSPO", ("--policy_loss", "gspo", *LOSS_FLAGS["gspo"], *FOUR_UPDATES)),
    Case("PPO", ("--advantage_estimator", "gae", "--critic_learning_rate", "3e-4", *FOUR_UPDATES)),
    Case("DAPO", (*DAPO_FLAGS, *FOUR_UPDATES)),
    Case("CPGD", ("--advantage_estimator", "cpgd", "--policy_loss", "cpgd", *LOSS_FLAGS["cpgd"], *FOUR_UPDATES)),
    Case("REINFORCE++", ("--advantage_estimator", "reinforce++", *ONE_UPDATE)),
]
SECTIONS: Mapping[str, Sequence[Case]] = {"estimators": ESTIMATORS, "losses": LOSSES, "algorithms": ALGORITHMS}
TITLES = {
    "estimators": "Advantage estimators, one update a rollout",
    "losses": "Policy losses with group_norm advantages, four updates a rollout",
    "algorithms": "Algorithms, mean and range over seeds",
}


PREFACE = """# Algorithms

The addition example (`examples/addition/`) with every estimator and policy loss: a character model of 0.8M parameters,
64 prompts x 8 answers a step, {steps} steps, reward 1 for a right sum. `lightrft explain --algorithms` has formulas and
sources. Rates are not tuned for each: the curves show that an algorithm learns, not which is best. DAPO's are of the
prompts that it keeps. dr_grpo and reinforce_baseline have the same advantages: what sets Dr. GRPO apart is
`--loss_agg_mode seq-mean-token-sum-norm`, which is not set here. on_policy_distillation sees no reward: its teacher is
the model that group_norm has trained.

Made by `python -m benchmarks.algorithms`: {environment}."""


@dataclass(frozen=True)
class Result:
    """What a run left: its rewards in training, and its accuracy on held-out sums."""

    rewards: Course
    summary: Mapping[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("runs/addition-data"), help="made by prepare.py")
    parser.add_argument("--runs", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--output", type=Path, default=Path("docs"))
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--only", nargs="+", help="names of cases; unset: all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the algorithms; others take the first"
    )
    parser.add_argument("--nproc_per_node", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--run_seconds", type=float, default=1800.0, help="a run that takes longer is ended")
    parser.set_defaults(engine_types=[], backends=[], fp32=True)
    args = parser.parse_args()
    chosen = {
        name: [case for case in SECTIONS[name] if not args.only or case.name in args.only] for name in args.sections
    }
    jobs = [(name, case, seed) for name in chosen for case in chosen[name] for seed in seeds_of(name, args)]
    with ThreadPoolExecutor(args.parallel) as pool:
        results = dict(zip(jobs, pool.map(partial(run, args), jobs), strict=True))
    args.output.mkdir(parents=True, exist_ok=True)
    for name, cases in chosen.items():
        draw(name, cases, results, seeds_of(name, args), args.output / f"algorithms_{name}.png")
    (args.output / "algorithms.md").write_text(page(chosen, results, args), encoding="utf-8")


def seeds_of(section: str, args: argparse.Namespace) -> list[int]:
    return args.seeds if section == "algorithms" else args.seeds[:1]


def run(args: argparse.Namespace, job: tuple[str, Case, int]) -> Result | None:
    """The run's result, made now or before; None where it failed."""
    section, case, seed = job
    folder = args.runs / section / f"{case.name}-{seed}"
    if not (folder / "summary.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.log").open("w") as log:
            try:
                subprocess.run(
                    command(args, case, seed, folder), cwd=ROOT, stdout=log, stderr=log, timeout=args.run_seconds
                )
            except subprocess.TimeoutExpired:
                log.write(f"ended after {args.run_seconds} s\n")
    if not (folder / "summary.json").is_file():
        return None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return Result(course(rows, "reward/mean"), json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def command(args: argparse.Namespace, case: Case, seed: int, folder: Path) -> list[str]:
    data = args.data.absolute()
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc_per_node", str(args.nproc_per_node), str(TRAIN), "--config", str(CONFIG)),
        *(
            "--pretrain",
            f"{data}/model",
            "--prompt_data",
            f"{data}/train.jsonl",
            "--eval_data",
            f"{data}/heldout.jsonl",
        ),
        *("--max_steps", str(args.steps), "--seed", str(seed), "--save_path", str(folder.absolute())),
        *(flag.format(runs=args.runs.absolute(), seed=seed) for flag in case.flags),
    ]


def draw(
    section: str,
    cases: Sequence[Case],
    results: Mapping[tuple[str, Case, int], Result | None],
    seeds: Sequence[int],
    picture: Path,
) -> None:
    """One curve a case, a moving average of the training reward; over several seeds their mean and range."""
    from cycler import cycler
    from matplotlib.colors import TABLEAU_COLORS
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    # There are ten colours; those that come again are dashed.
    axes.set_prop_cycle(cycler(linestyle=["-", "--"]) * cycler(color=TABLEAU_COLORS.values()))
    for case in cases:
        made = [result for seed in seeds if (result := results[section, case, seed]) is not None]
        if not made:
            continue
        curves = [moving_average(result.rewards.values, AVERAGED) for result in made]
        steps = made[0].rewards.steps[: min(map(len, curves))]
        values = [curve[: len(steps)] for curve in curves]
        means = [sum(column) / len(column) for column in zip(*values, strict=True)]
        [line] = axes.plot(steps, means, linewidth=1.5, label=case.name)
        if len(values) > 1:
            lowest, highest = ([bound(column) for column in zip(*values, strict=True)] for bound in (min, max))
            axes.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="step", ylabel=f"mean reward, average of {AVERAGED} steps", title=TITLES[section])
    axes.grid(alpha=0.3)
    # In the order in which the curves end.
    lines = sorted(axes.lines, key=lambda line: np.asarray(line.get_ydata())[-1], reverse=True)
    axes.legend(handles=lines, fontsize=8)
    figure.savefig(picture, dpi=150)


def page(
    chosen: Mapping[str, Sequence[Case]],
    results: Mapping[tuple[str, Case, int], Result | None],
    args: argparse.Namespace,
) -> str:
    """algorithms.md."""
    lines = [PREFACE.format(steps=args.steps, environment=environment(args))]
    for section, cases in chosen.items():
        seeds = seeds_of(section, args)
        lines += ["", f"## {TITLES[section]}", "", f"![{section}](algorithms_{section}.png)", ""]
        lines += ["| | flags | held-out sums right, before | after |", "|---|---|---|---|"]
        for case in cases:
            before, after = (accuracies(results, section, case, seeds, when) for when in ("before", "after"))
            lines.append(f"| {case.name} | `{' '.join(case.flags)}` | {before} | {after} |")
    return "\n".join(lines) + "\n"


def accuracies(
    results: Mapping[tuple[str, Case, int], Result | None],
    section: str,
    case: Case,
    seeds: Sequence[int],
    when: str,
) -> str:
    """`62 %`, one for each seed."""
    made = [results[section, case, seed] for seed in seeds]
    return ", ".join("failed" if r is None else f"{100 * r.summary[f'reward_{when}']:.0f} %" for r in made)


if __name__ == "__main__":
    main()
