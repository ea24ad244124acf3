"""Trainers: the iteration, and what builds it from a configuration."""

from lightrft.trainer.build import build_trainer

__all__ = ["build_trainer"]
