"""Trainers: the iteration, and what builds it from a configuration."""

from lightrft.trainer.build import build_trainer
from lightrft.trainer.callbacks import Callback
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, SPMDPPOTrainerVL

__all__ = ["Callback", "SPMDPPOTrainer", "SPMDPPOTrainerVL", "build_trainer"]
