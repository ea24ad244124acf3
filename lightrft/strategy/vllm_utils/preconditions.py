"""Preconditions: what must hold before vLLM is started. vLLM itself is not imported."""

import torch

from lightrft.config.arguments import Config
from lightrft.models.loading import LoadedConfig
from lightrft.strategy.utils.expected_weights import check_plain_weights, check_weights_fit

AUDIO_FRAMES = 3000
"""30 seconds, which vLLM's Qwen2-Audio takes whatever the configuration says."""


def check_vllm(config: Config, loaded: LoadedConfig) -> None:
    """Raises ValueError or NotImplementedError for what vLLM cannot do with this model on this machine."""
    check_plain_weights(loaded, "vLLM")
    _check_sounds(loaded)
    if torch.cuda.is_available():
        check_weights_fit(config, loaded)
    elif config.rollout.enable_engine_sleep:
        raise ValueError(
            "vLLM can sleep on GPUs only: there is none here, and engine sleep is on. Add --disable_engine_sleep."
        )


def _check_sounds(loaded: LoadedConfig) -> None:
    """Raises NotImplementedError for an encoder of another length than that of vLLM's model."""
    if loaded.tower != "audio_config":
        return
    num_frames = 2 * loaded.hf_config.audio_config.max_source_positions
    if num_frames != AUDIO_FRAMES:
        raise NotImplementedError(
            f"vLLM's {loaded.hf_config.model_type} hears {AUDIO_FRAMES} frames of sound: {loaded.pretrain} hears "
            f"{num_frames} (audio_config.max_source_positions={num_frames // 2}). Set --engine_type torch."
        )
