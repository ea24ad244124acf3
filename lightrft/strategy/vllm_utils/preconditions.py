"""Preconditions: what must hold before vLLM is started. vLLM itself is not imported."""

import torch

from lightrft.config.arguments import Config
from lightrft.models.loading import LoadedConfig
from lightrft.strategy.utils.expected_weights import check_plain_weights, check_weights_fit


def check_vllm(config: Config, loaded: LoadedConfig) -> None:
    """Raises ValueError or NotImplementedError for what vLLM cannot do with this model on this machine."""
    check_plain_weights(loaded, "vLLM")
    if torch.cuda.is_available():
        check_weights_fit(config, loaded)
    elif config.rollout.enable_engine_sleep:
        raise ValueError(
            "vLLM can sleep on GPUs only: there is none here, and engine sleep is on. Add --disable_engine_sleep."
        )
