"""Configuration: frozen dataclasses by owner, the command line derived from them, and the checks across them."""

from lightrft.config.arguments import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ReportConfig,
    RewardConfig,
    RolloutConfig,
    StrategyConfig,
    TrainConfig,
)
from lightrft.config.checks import check_config, check_launched, nearest_multiples
from lightrft.config.cli import dump_yaml, parse_config, usage_errors

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ReportConfig",
    "RewardConfig",
    "RolloutConfig",
    "StrategyConfig",
    "TrainConfig",
    "check_config",
    "check_launched",
    "dump_yaml",
    "nearest_multiples",
    "parse_config",
    "usage_errors",
]
