"""Preconditions: what must hold before SGLang is started, and the arguments that it gets. SGLang is not imported."""

import importlib.util
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from lightrft.config.arguments import Config
from lightrft.models.loading import LoadedConfig, empty_model
from lightrft.strategy.sglang_utils.library import LOADER, SAMPLER
from lightrft.strategy.utils.expected_weights import check_plain_weights, check_weights_fit

SLACK_TOKENS = 8
"""SGLang quietly shortens responses that come nearer to the end of its context."""
LARGEST_GRAPH = 512
"""Responses that are decoded together without Python, on a GPU with memory for it; SGLang itself stops at 256."""
_LARGE_GPU_BYTES = 60 * 2**30


def check_sglang(config: Config, loaded: LoadedConfig) -> None:
    """Raises ValueError or NotImplementedError for what SGLang cannot do with this model on this machine."""
    check_plain_weights(loaded, "SGLang")
    if not torch.cuda.is_available():
        raise ValueError("SGLang runs on GPUs: there is none here. Set --engine_type torch.")
    check_weights_fit(config, loaded)


def engine_arguments(
    folder: Path,
    *,
    dtype: torch.dtype,
    mem_util: float,
    max_model_len: int,
    sleeps: bool,
    tp_size: int,
    first_gpu: int,
    gpu_bytes: int,
    port: int,
    enforce_eager: bool,
    takes_stop_strings: bool,
    timeout_seconds: float,
) -> dict[str, Any]:
    """Fields of `sglang.ServerArgs`."""
    return {
        "model_path": str(folder),
        "load_format": "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "skip_tokenizer_init": not takes_stop_strings,
        "context_length": max_model_len + SLACK_TOKENS,
        "mem_fraction_static": mem_util,
        "tp_size": tp_size,
        "base_gpu_id": first_gpu,
        "nccl_port": port,
        "dist_timeout": math.ceil(timeout_seconds),
        "enable_memory_saver": sleeps,
        "attention_backend": attention_backend(),
        "sampling_backend": SAMPLER,
        "custom_weight_loader": [LOADER],
        "disable_cuda_graph": enforce_eager,
        "cuda_graph_max_bs_decode": LARGEST_GRAPH if gpu_bytes >= _LARGE_GPU_BYTES else None,
        # Graphs of prefills are compiled for a minute, and prompts are the small part of a rollout.
        "disable_prefill_cuda_graph": True,
        "random_seed": 0,
        "log_level": "error",
    }


def attention_backend() -> str | None:
    """None leaves it to SGLang, which takes FlashAttention 3 on a Hopper GPU; where that is not installed, Triton."""
    kernels = importlib.util.find_spec("sgl_kernel")
    if kernels is None or kernels.submodule_search_locations is None:
        return None
    folders = [Path(folder) for folder in kernels.submodule_search_locations]
    return None if any(any(folder.glob("flash_ops*.so")) for folder in folders) else "triton"


def write_engine_folder(loaded: LoadedConfig, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """The model's configuration without end tokens, which SGLang would stop at, and the tokenizer without one.

    Nor is there a generation configuration with any.
    """
    hf_config = deepcopy(loaded.hf_config)
    hf_config.eos_token_id = None
    if not hf_config.architectures:
        hf_config.architectures = [type(empty_model(loaded, "causal_lm", torch.bfloat16)).__name__]
    hf_config.save_pretrained(folder)
    GenerationConfig().save_pretrained(folder)
    if tokenizer is not None:
        endless = deepcopy(tokenizer)
        endless.eos_token = None
        endless.save_pretrained(folder)
