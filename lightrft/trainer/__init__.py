"""Trainers: the iteration, and what builds it from a configuration."""

import importlib
from typing import TYPE_CHECKING, Any

from lightrft.trainer.build import build_reward_model_trainer, build_trainer
from lightrft.trainer.callbacks import Callback
from lightrft.utils.imports import large_imports

if TYPE_CHECKING:
    from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, SPMDPPOTrainerVL

__all__ = ["Callback", "SPMDPPOTrainer", "SPMDPPOTrainerVL", "build_reward_model_trainer", "build_trainer"]


def __getattr__(name: str) -> Any:
    """A trainer's class, imported when it is asked for: it brings torch, and --help and wrong flags need none."""
    if name not in ("SPMDPPOTrainer", "SPMDPPOTrainerVL"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with large_imports():
        module = importlib.import_module("lightrft.trainer.spmd_ppo_trainer")
    return vars(module)[name]
