"""Hugging Face export: a folder that loads on its own."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def export_hf(
    model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Writes weights, configuration, generation configuration and tokenizer under a temporary name, then renames.

    Args:
        model: Gives configuration and class; its own weights, which may be shards, are not read.
        weights: Full tensors by Hugging Face name.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, state_dict={name: tensor.contiguous() for name, tensor in weights})
    tokenizer.save_pretrained(partial)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)
