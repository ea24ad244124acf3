"""From a configuration to a trainer that is ready to fit.

torch, transformers and what is made of them are imported in here once the flags are right: that takes seconds, which
--help and a mistaken flag need not wait for.
"""

import os
from typing import TYPE_CHECKING

from lightrft.config import Config, check_launched, usage_errors
from lightrft.config.preference import RewardModelConfig, check_reward_model_config
from lightrft.utils.imports import large_imports
from lightrft.utils.logging import setup_logging

if TYPE_CHECKING:
    from lightrft.trainer.reward_model_trainer import RewardModelTrainer
    from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer


def build_trainer(config: Config) -> "SPMDPPOTrainer":
    """Checks the configuration, then loads and shards every role. Every rank must call it.

    A user's mistake ends the process with one message before any model is loaded.
    """
    setup_logging(int(os.environ.get("RANK", "0")))
    with usage_errors():
        check_launched(config)
    with large_imports():
        from transformers.utils.logging import disable_progress_bar

        from lightrft.trainer.setup import check_inputs
        from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer

    disable_progress_bar()
    with usage_errors():
        inputs = check_inputs(config)
    return SPMDPPOTrainer(config, inputs=inputs)


def build_reward_model_trainer(config: RewardModelConfig) -> "RewardModelTrainer":
    """Checks the configuration, then loads and shards the model. Every rank must call it.

    A user's mistake ends the process with one message before any model is loaded.
    """
    setup_logging(int(os.environ.get("RANK", "0")))
    with usage_errors():
        check_reward_model_config(config)
    with large_imports():
        from transformers.utils.logging import disable_progress_bar

        from lightrft.trainer.reward_model_setup import check_pair_inputs
        from lightrft.trainer.reward_model_trainer import RewardModelTrainer

    disable_progress_bar()
    with usage_errors():
        inputs = check_pair_inputs(config)
    return RewardModelTrainer(config, inputs=inputs)
