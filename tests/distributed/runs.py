"""Configurations and strategies for tests on real ranks, and the task of whole runs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightrft.config import Config, DataConfig, ModelConfig, StrategyConfig
from lightrft.strategy.fsdp.fsdpv2 import FSDPV2Strategy
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.strategy_base import StrategyBase
from tests import tiny_models

ROLLOUT = {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "generate_max_len": 6}
TRAIN = {"train_batch_size": 16, "micro_train_batch_size": 4, "max_steps": 2}
OPTIMIZER = {
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
}
BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True},
    "zero1": {"fsdp": False, "zero_stage": 1},
    "zero2": {"fsdp": False, "zero_stage": 2},
    "zero3": {"fsdp": False, "zero_stage": 3},
}
"""Flags of each way to train."""


def config(pretrain: str = "unused", **owners: dict[str, Any]) -> Config:
    """A configuration on FSDP2; `owners` maps an owner to changes of its fields: `train={"seed": 1}`."""
    base = Config(
        ModelConfig(pretrain),
        DataConfig("unused"),
        strategy=StrategyConfig(fsdp=True, dist_timeout_seconds=60.0),
    )
    return replace(base, **{owner: replace(getattr(base, owner), **changes) for owner, changes in owners.items()})


@contextmanager
def strategy_on(backend: str, pretrain: str = "unused", **owners: dict[str, Any]) -> Iterator[StrategyBase]:
    """A strategy of one of `BACKENDS` that is set up, as `fsdp` gives it."""
    owners["strategy"] = BACKENDS[backend] | owners.get("strategy", {})
    strategy = get_strategy(config(pretrain, **owners))
    strategy.setup_distributed()
    yield strategy
    strategy.close()


@contextmanager
def fsdp(pretrain: str = "unused", **owners: dict[str, Any]) -> Iterator[FSDPV2Strategy]:
    """A strategy that is set up; it is closed when the test went well, since closing waits for all ranks."""
    strategy = get_strategy(config(pretrain, **owners))
    assert isinstance(strategy, FSDPV2Strategy)
    strategy.setup_distributed()
    yield strategy
    strategy.close()


def save_task(folder: Path) -> None:
    """A tiny model, and 12 prompts whose reward has variance: does the response hold this digit?"""
    tiny_models.save_model(folder / "model")
    rows = [{"input": f"{a}+{b}=", "label": str(b)} for a in range(4) for b in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_config(task: Path, save_path: Path, **owners: dict[str, Any]) -> Config:
    """Two steps of GRPO on the task; `owners` maps an owner to changes of its fields."""
    changes = {
        "algorithm": {"advantage_estimator": "group_norm", "init_kl_coef": 0.0},
        "rollout": ROLLOUT,
        "train": TRAIN | {"save_path": str(save_path)},
        "optimizer": OPTIMIZER,
        "reward": {"reward_fn": "contains_answer"},
    }
    for owner, change in owners.items():
        changes[owner] = changes.get(owner, {}) | change
    data = DataConfig(prompt_data=str(task / "prompts.jsonl"), prompt_max_len=8)
    data = replace(data, **changes.pop("data", {}))
    return replace(config(str(task / "model"), **changes), data=data)


def read(config: Config, name: str) -> list[dict[str, Any]]:
    """Lines of a file in the run folder."""
    return [json.loads(line) for line in (Path(config.train.save_path) / name).read_text().splitlines()]


def ledger_peaks(line: dict[str, Any], phase: str) -> dict[str, int]:
    """Bytes by owner at a phase's peak, from a line of metrics.jsonl that was written with --print_memory_ledger."""
    prefix, ending = f"memory/{phase}_peak/", "_gib"
    return {
        name.removeprefix(prefix).removesuffix(ending): round(value * 2**30)
        for name, value in line.items()
        if name.startswith(prefix)
    }
