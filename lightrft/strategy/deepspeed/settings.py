"""Settings: what DeepSpeed is told of a role."""

from collections import Counter
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lightrft.config import Config
from lightrft.strategy.roles import decoder_layers, hf_model_of

REDUCE_BUCKET = 50_000_000
"""Gradients that are reduced together, in numbers. Memory for them is taken once for each role and kept: DeepSpeed's
own ten times as many cost 2 GB of a device that an engine shares. A larger weight's gradient is reduced alone."""

PREFETCH_BUCKET = 50_000_000
"""Weights that ZeRO-3 gathers ahead at least, in numbers: DeepSpeed's own."""


def zero_stage(config: Config) -> int:
    return config.strategy.zero_stage or 2


def has_bf16_optimizer(config: Config) -> bool:
    """Whether DeepSpeed trains with an optimizer of its own for bf16, which it cannot offload."""
    return zero_stage(config) == 1 and config.model.bf16 and not config.strategy.adam_offload


def trained_settings(config: Config, role: nn.Module, device_type: str) -> dict[str, Any]:
    """Of a role that learns: fp32 master weights and moments, fp32 sums of gradients."""
    zero: dict[str, Any] = {"stage": zero_stage(config)}
    if config.strategy.adam_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device_type == "cuda"}
    settings = _settings(config, zero, role)
    settings["gradient_clipping"] = config.optimizer.max_norm
    settings["communication_data_type"] = "fp32"
    settings["data_types"] = {"grad_accum_dtype": "fp32"}
    # PyTorch's AdamW, which FSDP2 uses too, needs no compiler.
    settings["zero_force_ds_cpu_optimizer"] = False
    return settings


def frozen_settings(config: Config, role: nn.Module, device_type: str) -> dict[str, Any]:
    """Of a frozen role under ZeRO-3: its shards are on the host, and each layer comes to the device to compute."""
    zero = {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": device_type == "cuda"}}
    return _settings(config, zero, role)


def whole_layers(hf_model: PreTrainedModel) -> list[nn.Module]:
    """Decoder layers whose weights ZeRO-3 should gather at once, and whose gradients it should reduce at once.

    It does so when the gradient of a layer's input is there. A layer that learns while nothing before it does, an
    adapter's first, has no such gradient. Weights that layers share have theirs when the first of these layers has.
    """
    inside = set(hf_model.get_decoder().modules())
    layers = [layer for layer in decoder_layers(hf_model) if layer in inside]
    times = Counter(parameter for layer in layers for parameter in layer.parameters())
    learning = [_learns(part) for part in (hf_model.get_input_embeddings(), *layers)]
    return [
        layer
        for i, layer in enumerate(layers)
        if (any(learning[: i + 1]) or not learning[i + 1]) and all(times[p] == 1 for p in layer.parameters())
    ]


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _settings(config: Config, zero: dict[str, Any], role: nn.Module) -> dict[str, Any]:
    zero["reduce_bucket_size"] = REDUCE_BUCKET
    if zero["stage"] == 3:
        # What is no matrix is smaller than a message is worth.
        small = [weight.ds_numel for weight in _weights(role) if len(weight.ds_shape) < 2]
        zero["stage3_param_persistence_threshold"] = max(small, default=0)
        # While a layer computes, all of the next one should come.
        zero["stage3_prefetch_bucket_size"] = max(PREFETCH_BUCKET, _largest_layer(hf_model_of(role)))
        zero["memory_efficient_linear"] = False
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": config.model.bf16},
        "zero_optimization": zero,
    }


def _largest_layer(hf_model: PreTrainedModel) -> int:
    """Numbers in the matrices of the largest layer that is gathered at once."""
    layers = [_weights(layer) for layer in whole_layers(hf_model)]
    return max((sum(w.ds_numel for w in layer if len(w.ds_shape) > 1) for layer in layers), default=0)


def _weights(module: nn.Module) -> list[Any]:
    """With what DeepSpeed has noted at them."""
    return list(module.parameters())
