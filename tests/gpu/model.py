"""A model of a real size for a GPU."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests import tiny_models


def save_qwen2(folder: Path) -> None:
    """Qwen2 0.5B with random weights."""
    config = tiny_models.qwen2(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
