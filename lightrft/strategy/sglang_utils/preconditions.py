"""Preconditions: what must hold before SGLang is started, and the arguments that it gets. SGLang is not imported."""

import importlib.util
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoProcessor, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from lightrft.config.arguments import Config
from lightrft.models.loading import LoadedConfig, empty_model
from lightrft.strategy.sglang_utils.library import LOADER, SAMPLER
from lightrft.strategy.sglang_utils.media import FAMILIES, QWEN2_5_VL_PATCH
from lightrft.strategy.utils.expected_weights import check_plain_weights, check_weights_fit

SLACK_TOKENS = 8
"""SGLang quietly shortens responses that come nearer to the end of its context."""
LARGEST_GRAPH = 512
"""Responses that are decoded together without Python, on a GPU with memory for it; SGLang itself stops at 256."""
CPU_TOKENS = 2**14
"""Of the KV cache on a CPU, where tests alone run SGLang: its share would be of the whole machine's memory."""
_LARGE_GPU_BYTES = 60 * 2**30


def check_sglang(config: Config, loaded: LoadedConfig) -> None:
    """Raises ValueError or NotImplementedError for what SGLang cannot do with this model on this machine."""
    check_plain_weights(loaded, "SGLang")
    if loaded.tower is not None:
        check_family(loaded.hf_config)
    if not torch.cuda.is_available():
        raise ValueError("SGLang runs on GPUs: there is none here. Set --engine_type torch.")
    if not config.model.bf16:
        raise ValueError("SGLang computes in bf16: its kernels take no fp32. Add --bf16, or set --engine_type torch.")
    check_weights_fit(config, loaded)


def check_family(hf_config: PretrainedConfig) -> None:
    """Raises NotImplementedError for a model with a tower that SGLang cannot run."""
    if hf_config.model_type not in FAMILIES:
        raise NotImplementedError(
            f"SGLang has models that take media of the families {', '.join(FAMILIES)}: got {hf_config.model_type}. "
            "Set --engine_type torch or vllm."
        )
    if hf_config.model_type == "qwen2_5_vl" and num_patch_values(hf_config) != QWEN2_5_VL_PATCH:
        raise NotImplementedError(
            f"SGLang takes images of Qwen2.5-VL in patches of {QWEN2_5_VL_PATCH} numbers alone: this model's have "
            f"{num_patch_values(hf_config)}. Set --engine_type torch or vllm."
        )


def num_patch_values(hf_config: PretrainedConfig) -> int:
    vision = hf_config.vision_config
    return vision.in_channels * vision.temporal_patch_size * vision.patch_size**2


def engine_arguments(
    folder: Path,
    *,
    dtype: torch.dtype,
    mem_util: float,
    max_model_len: int,
    sleeps: bool,
    tp_size: int,
    device: str,
    first_gpu: int,
    gpu_bytes: int,
    port: int,
    enforce_eager: bool,
    takes_stop_strings: bool,
    timeout_seconds: float,
) -> dict[str, Any]:
    """Fields of `sglang.ServerArgs`."""
    attention, tower_attention = attention_backends(device)
    return {
        "model_path": str(folder),
        "load_format": "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "skip_tokenizer_init": not takes_stop_strings,
        "context_length": max_model_len + SLACK_TOKENS,
        "mem_fraction_static": mem_util,
        "max_total_tokens": CPU_TOKENS if device == "cpu" else None,
        "tp_size": tp_size,
        "device": device,
        "base_gpu_id": first_gpu,
        "nccl_port": port,
        "dist_timeout": math.ceil(timeout_seconds),
        "enable_memory_saver": sleeps,
        "attention_backend": attention,
        "mm_attention_backend": tower_attention,
        "sampling_backend": SAMPLER,
        "custom_weight_loader": [LOADER],
        "disable_cuda_graph": enforce_eager,
        "cuda_graph_max_bs_decode": LARGEST_GRAPH if gpu_bytes >= _LARGE_GPU_BYTES else None,
        # Graphs of prefills are compiled for a minute, and prompts are the small part of a rollout.
        "disable_prefill_cuda_graph": True,
        "random_seed": 0,
        "log_level": "error",
    }


def attention_backends(device: str) -> tuple[str | None, str | None]:
    """Of the decoder, and of what reads media.

    None leaves them to SGLang, which takes FlashAttention 3 on a Hopper GPU; where that is not installed, Triton's.
    """
    if device == "cpu":
        return "torch_native", "sdpa"
    kernels = importlib.util.find_spec("sgl_kernel")
    if kernels is None or kernels.submodule_search_locations is None:
        return None, None
    folders = [Path(folder) for folder in kernels.submodule_search_locations]
    has_flash = any(any(folder.glob("flash_ops*.so")) for folder in folders)
    return (None, None) if has_flash else ("triton", "triton_attn")


def write_engine_folder(loaded: LoadedConfig, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """The model's configuration without end tokens, which SGLang would stop at, and the tokenizer without one.

    Nor is there a generation configuration with any. A model that takes media has its processor there too, which
    SGLang loads and does not use.
    """
    hf_config = deepcopy(loaded.hf_config)
    hf_config.eos_token_id = None
    if not hf_config.architectures:
        hf_config.architectures = [type(empty_model(loaded, "causal_lm", torch.bfloat16)).__name__]
    if hf_config.model_type == "qwen2_vl":
        # The name in published folders, which SGLang reads.
        hf_config.vision_config.in_chans = hf_config.vision_config.in_channels
    hf_config.save_pretrained(folder)
    GenerationConfig().save_pretrained(folder)
    if loaded.tower is not None:
        processor = AutoProcessor.from_pretrained(loaded.pretrain)
        processor.tokenizer.eos_token = None
        processor.save_pretrained(folder)
    if tokenizer is not None:
        endless = deepcopy(tokenizer)
        endless.eos_token = None
        endless.save_pretrained(folder)
