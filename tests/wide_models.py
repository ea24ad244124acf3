"""Tiny models that engines of other packages take: with wider heads, and choices that are not all the same."""

import torch
from transformers import PreTrainedModel

from tests import tiny_models
from tests.tiny_models import random_model

MAX_MODEL_LEN = 384
SIZES = {"hidden_size": 128, "intermediate_size": 96, "max_position_embeddings": MAX_MODEL_LEN, "eos_token_id": None}
"""vLLM's kernels for CPUs take heads of 32 numbers or more; a fourth of four heads goes to each of two ranks twice."""
HEADS_OF_64 = {"hidden_size": 256}
"""Changes for SGLang, whose rotary kernel takes no smaller heads."""


def wide_qwen2(**changes: object) -> PreTrainedModel:
    return _lively(random_model(tiny_models.qwen2(**SIZES | changes)))


def wide_llama(**changes: object) -> PreTrainedModel:
    return _lively(random_model(tiny_models.llama(**SIZES | changes)))


def _lively(model: PreTrainedModel) -> PreTrainedModel:
    """Wider layers need larger weights for choices that are not all the same; biases start at 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(2)
            elif name.endswith("bias"):
                parameter.normal_()
    return model
