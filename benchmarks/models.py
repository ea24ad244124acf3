"""Models of real sizes without their weights: a folder with a configuration and a tokenizer, and random weights."""

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config

from lightrft.models.loading import LoadedConfig, empty_model, load_config
from lightrft.models.weights import persistent_tensors

_SHARED: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "14b": {
        "vocab_size": 152064,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
"""Qwen2.5's own sizes, and one for a CPU."""

_WINDOW_STEP = 7
_SPREAD = 2**22
"""Numbers over which the windows of different weights begin."""
_LARGEST_COPIED = 2**24


def write_model(size: str, folder: Path) -> str:
    """A Hugging Face folder without weights; returns its path."""
    config = Qwen2Config(**_SHARED | SIZES[size], bos_token_id=None, eos_token_id=1, pad_token_id=0)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    words = {f"t{i}": i for i in range(256)}
    core = Tokenizer(models.WordLevel(words, unk_token="t0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="t0", eos_token="t1").save_pretrained(folder)
    return str(folder)


def load_random(folder: str) -> LoadedConfig:
    """What `prepare_model` takes, with random weights."""
    loaded = load_config(folder, "auto")
    return replace(loaded, weights=lambda dtype: _random(loaded, dtype))


def _random(loaded: LoadedConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights that take no memory of their own: each row is a window of one line of random numbers, one step on."""
    shapes = {name: t.shape for name, t in persistent_tensors(empty_model(loaded, "causal_lm", dtype))}
    longest = max(_WINDOW_STEP * shape[0] + shape[-1] for shape in shapes.values())
    line = (0.02 * torch.randn(longest + _SPREAD, generator=torch.Generator().manual_seed(0))).to(dtype)
    return {name: _weight(name, shape, line) for name, shape in shapes.items()}


def _weight(name: str, shape: torch.Size, line: Tensor) -> Tensor:
    if len(shape) == 1:
        return torch.full(shape, 1.0 if "norm" in name else 0.0, dtype=line.dtype)
    # Another start for each weight, or those of equal shape would be equal.
    start = zlib.crc32(name.encode()) % (len(line) - _WINDOW_STEP * (shape[0] - 1) - shape[1] + 1)
    window = line.as_strided(shape, (_WINDOW_STEP, 1), start)
    # Collectives on the host take only what is contiguous.
    return window.contiguous() if shape.numel() <= _LARGEST_COPIED else window
