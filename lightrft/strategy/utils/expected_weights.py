"""Expected weights: what an engine of another package gets from the actor, and whether it can hold them."""

import os

import torch

from lightrft.config.arguments import Config
from lightrft.models.loading import LoadedConfig, empty_model
from lightrft.models.lora import engine_weights
from lightrft.models.weights import sent_dtype
from lightrft.types import WeightSpec

_GIB = 2**30


def weight_specs(loaded: LoadedConfig, dtype: torch.dtype) -> list[WeightSpec]:
    """The weights that the actor will send: those of the published folder, a tied one once."""
    weights = engine_weights(empty_model(loaded, "causal_lm", dtype))
    return [WeightSpec(w.name, tuple(w.tensor.shape), sent_dtype(w.tensor, dtype)) for w in weights]


def check_plain_weights(loaded: LoadedConfig, engine: str) -> None:
    """Raises NotImplementedError for a quantised model."""
    if "quantization_config" in loaded.hf_config.to_dict():
        raise NotImplementedError(
            f"{engine} gets its weights from the actor, and only plain ones: {loaded.pretrain} is quantised. "
            "Choose another folder, or set --engine_type torch."
        )


def check_weights_fit(config: Config, loaded: LoadedConfig) -> None:
    """Raises ValueError where the engine's share of this rank's GPU cannot hold its part of the weights."""
    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    total_bytes = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory
    num_bytes = sum(spec.num_bytes for spec in weight_specs(loaded, dtype))
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
