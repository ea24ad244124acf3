"""build_trainer: from a configuration to a trainer that is ready to fit."""

import os

from transformers.utils.logging import disable_progress_bar

from lightrft.config import Config, usage_errors
from lightrft.trainer.setup import check_inputs
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer
from lightrft.utils.logging import setup_logging


def build_trainer(config: Config) -> SPMDPPOTrainer:
    """Checks the configuration, then loads and shards every role. Every rank must call it.

    A user's mistake ends the process with one message before any model is loaded.
    """
    setup_logging(int(os.environ.get("RANK", "0")))
    disable_progress_bar()
    with usage_errors():
        inputs = check_inputs(config)
    return SPMDPPOTrainer(config, inputs=inputs)
