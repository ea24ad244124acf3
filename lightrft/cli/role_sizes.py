"""Role sizes: what the planner must know of the models of a run, and of the device."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from lightrft.cli.model_size import ModelSize
from lightrft.config import Config
from lightrft.models.loading import LoadedConfig, empty_model
from lightrft.models.lora import adapter_tensors
from lightrft.trainer.local_rewards import LoadedRewardModel


def model_sizes(config: Config, actor: LoadedConfig, critic: LoadedConfig) -> tuple[ModelSize, ModelSize | None]:
    """Of the actor, and of the critic where there is one."""
    learned = None
    if config.model.trains_adapter:
        learned = sum(tensor.numel() for _, tensor in adapter_tensors(empty_model(actor, "causal_lm", torch.float32)))
    plain = empty_model(replace(actor, adapter=None), "causal_lm", torch.float32)
    of_actor = ModelSize.of(plain, has_lm_head=True, learned=learned)
    if not config.algorithm.trains_critic:
        return of_actor, None
    return of_actor, ModelSize.of(empty_model(critic, "trunk", torch.float32), has_lm_head=False)


def frozen_size(loaded: LoadedConfig) -> ModelSize:
    return ModelSize.of(empty_model(loaded, "causal_lm", torch.float32), has_lm_head=True)


def reward_sizes(models: Sequence[LoadedRewardModel]) -> dict[str, ModelSize]:
    return {
        loaded.name: ModelSize.of(empty_model(loaded.model, "classifier", torch.float32), has_lm_head=False)
        for loaded in models
    }


def device_bytes() -> int | None:
    """Memory of this machine's first GPU, or None where it has none."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
