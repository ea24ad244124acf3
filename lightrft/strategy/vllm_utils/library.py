"""vLLM itself: the only module that imports it, and what is taken of its inner parts."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import BatchFeature


def import_vllm() -> Any:
    """The module `vllm`, set to run its engine core in this process, where the weights can be reached."""
    # vLLM reads these when it is imported, or soon after.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # FlashInfer's sampler takes no seeds, and compiles for a minute at the first start on a machine.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if multicast_is_off():
        os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
        os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
    import vllm  # pyright: ignore[reportMissingImports]

    return vllm


def multicast_is_off() -> bool:
    """Whether the user has switched NVLink multicast off.

    FlashInfer, by which vLLM reduces over GPUs of one host, takes it all the same, and its kernel ends in an illegal
    memory access then.
    """
    return os.environ.get("NCCL_NVLS_ENABLE") == "0" or os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1"


def compilation_config() -> dict[str, Any]:
    """What vLLM is told to compile otherwise than it would."""
    return {"pass_config": {"fuse_allreduce_rms": False}} if multicast_is_off() else {}


def argument_names() -> set[str]:
    """Of `vllm.LLM`, in this version."""
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    return {field.name for field in dataclasses.fields(EngineArgs)}


def logits_layers(model: nn.Module) -> list[Any]:
    """The parts of a model that make logits of hidden states."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor  # pyright: ignore[reportMissingImports]

    return [module for module in model.modules() if isinstance(module, LogitsProcessor)]


def text_input(ids: list[int]) -> dict[str, Any]:
    """What vLLM makes of a prompt without media."""
    from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]

    return tokens_input(ids)


def media_input(
    ids: list[int],
    inputs: Mapping[str, Tensor],
    names: Mapping[str, Sequence[str]],
    ranges: Mapping[str, Sequence[tuple[int, Tensor]]],
    processor: Any,
) -> dict[str, Any]:
    """What vLLM's processor makes of a prompt with media.

    Args:
        inputs: What the model's own processor makes.
        names: By kind, under which what is made of each item is cached.
        ranges: By kind, where each item starts in the prompt, and which tokens from there on are pieces of it.
        processor: vLLM's of the model.
    """
    from vllm.inputs.engine import mm_input  # pyright: ignore[reportMissingImports]
    from vllm.multimodal.inputs import (  # pyright: ignore[reportMissingImports]
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    features = BatchFeature(dict(inputs))
    fields = processor._get_mm_fields_config(features, {})
    return mm_input(
        prompt_token_ids=ids,
        mm_kwargs=MultiModalKwargsItems.from_hf_inputs(features, fields),
        mm_hashes={kind: list(each) for kind, each in names.items()},
        mm_placeholders={
            kind: [PlaceholderRange(start, len(mask), mask) for start, mask in each] for kind, each in ranges.items()
        },
    )
