"""Tiny models with adapters."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.config import Config, DataConfig, ModelConfig
from lightrft.models.loading import LoadedConfig, empty_model, load_config, pretrained_weights, with_adapter
from lightrft.models.lora import adapter_config, adapter_tensors, sent_weights, write_adapter


def adapted(folder: str, init_kl_coef: float = 0.01, **options: object) -> LoadedConfig:
    """What a run with these flags loads its actor by."""
    config = Config(ModelConfig(folder, **options), DataConfig())
    config = replace(config, algorithm=replace(config.algorithm, init_kl_coef=init_kl_coef))
    return with_adapter(load_config(folder, "padded"), config)


def live(loaded: LoadedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model in one piece, as a run starts it."""
    model = empty_model(loaded, "causal_lm", dtype)
    model.load_state_dict(pretrained_weights(loaded, "causal_lm", dtype), strict=False, assign=True)
    model.tie_weights()
    return model.eval()


def disturb(model: nn.Module) -> None:
    """Changes the adapter, as if it had been trained."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model):
            if "lora_B" in name:
                tensor.normal_(0.0, 0.1, generator=generator)


def merged(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a strategy sends of a model that is in one piece."""
    with torch.no_grad():
        return {
            weight.name: weight.made([part.detach().to(kind) for part, kind in weight.parts(dtype)], dtype)
            for weight in sent_weights(model)
        }


def save_adapter(folder: Path, model: PreTrainedModel) -> str:
    """A peft folder; returns its path."""
    write_adapter(adapter_config(model), dict(adapter_tensors(model)), folder)
    return str(folder)
