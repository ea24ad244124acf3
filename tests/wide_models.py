"""Tiny models that engines of other packages take: with wider heads, and choices that are not all the same."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel

from tests import tiny_media, tiny_media_models, tiny_models
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


_WIDE_MROPE = tiny_media_models.MROPE | {"mrope_section": [4, 6, 6]}
_WIDE_TEXT = tiny_media_models.TEXT | {"hidden_size": 128, "eos_token_id": 1, "max_position_embeddings": MAX_MODEL_LEN}
_WIDE_PARTS: dict[str, dict[str, dict[str, object]]] = {
    "qwen2_vl": {"text_config": {"rope_parameters": _WIDE_MROPE}, "vision_config": {"hidden_size": 128}},
    "qwen2_5_vl": {"text_config": {"rope_parameters": _WIDE_MROPE}, "vision_config": {"out_hidden_size": 128}},
    "qwen3_vl": {
        "text_config": {"rope_parameters": _WIDE_MROPE | {"mrope_interleaved": True}, "head_dim": 32},
        "vision_config": {"out_hidden_size": 128},
    },
    "internvl": {"text_config": {}, "vision_config": {}},
    # vLLM's model hears 30 seconds, whatever the configuration says.
    "qwen2_audio": {"text_config": {}, "audio_config": {"max_source_positions": 1500}},
}
"""What differs from `tiny_media_models.CONFIGS`, beside the sizes of text."""


def wide_media_config(family: str) -> PretrainedConfig:
    arguments: dict[str, object] = dict(tiny_media_models.CONFIGS[family])
    for part, changes in _WIDE_PARTS[family].items():
        sizes = _WIDE_TEXT if part == "text_config" else {}
        arguments[part] = tiny_media_models.CONFIGS[family][part] | sizes | changes
    return AutoConfig.for_model(family, **arguments)


def wide_media(family: str, seed: int = 0) -> PreTrainedModel:
    """A model that takes media, with the special tokens and the sizes of items of `tiny_media_models`."""
    torch.manual_seed(seed)
    model = AutoModelForMultimodalLM.from_config(wide_media_config(family), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3)
    return model.eval()


def save_wide_media(folder: Path, family: str, seed: int = 0) -> str:
    """A folder with model and processor; returns its path."""
    wide_media(family, seed).save_pretrained(folder)
    save_wide_processor(folder, family)
    return str(folder)


def save_wide_processor(folder: Path, family: str) -> None:
    processor = tiny_media.PROCESSORS[family]()
    if family == "qwen2_audio":
        processor = tiny_media.qwen2_audio(seconds=30)
    processor.save_pretrained(folder)


def _lively(model: PreTrainedModel) -> PreTrainedModel:
    """Wider layers need larger weights for choices that are not all the same; biases start at 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(2)
            elif name.endswith("bias"):
                parameter.normal_()
    return model
