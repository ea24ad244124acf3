"""Preconditions: what must hold before vLLM is started. vLLM itself is not imported."""

import math
import os

import torch

from lightrft.config.arguments import Config
from lightrft.models.loading import LoadedConfig, empty_model
from lightrft.models.lora import sent_weights
from lightrft.models.weights import sent_dtype
from lightrft.types import WeightSpec

_GIB = 2**30


def check_vllm(config: Config, loaded: LoadedConfig) -> None:
    """Raises ValueError or NotImplementedError for what vLLM cannot do with this model on this machine."""
    if "quantization_config" in loaded.hf_config.to_dict():
        raise NotImplementedError(
            f"vLLM gets its weights from the actor, and only plain ones: {loaded.pretrain} is quantised. "
            "Choose another folder, or set --engine_type torch."
        )
    if not torch.cuda.is_available():
        if config.rollout.enable_engine_sleep:
            raise ValueError(
                "vLLM can sleep on GPUs only: there is none here, and engine sleep is on. Add --disable_engine_sleep."
            )
        return
    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    total_bytes = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory
    num_bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in weight_specs(loaded, dtype))
    check_memory_share(num_bytes, total_bytes, config.rollout.engine_mem_util, config.rollout.engine_tp_size)


def check_memory_share(weight_bytes: int, total_bytes: int, mem_util: float, tp_size: int) -> None:
    """Raises ValueError where a rank's part of the weights leaves nothing of the engine's share of the device."""
    part = weight_bytes / tp_size
    if part < mem_util * total_bytes:
        return
    raise ValueError(
        f"engine_mem_util must hold the engine's weights and its KV cache: {weight_bytes / _GIB:.1f} GiB of weights "
        f"over engine_tp_size={tp_size} are {part / _GIB:.1f} GiB a rank, and engine_mem_util={mem_util} of "
        f"{total_bytes / _GIB:.1f} GiB is {mem_util * total_bytes / _GIB:.1f} GiB. "
        f"Set --engine_mem_util above {part / total_bytes:.2f}, or raise --engine_tp_size."
    )


def weight_specs(loaded: LoadedConfig, dtype: torch.dtype) -> list[WeightSpec]:
    """The weights that the actor will send: those of the Hugging Face model, a tied one once."""
    weights = sent_weights(empty_model(loaded, "causal_lm", dtype))
    return [WeightSpec(w.name, tuple(w.tensor.shape), sent_dtype(w.tensor, dtype)) for w in weights]
