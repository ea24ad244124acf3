"""Hugging Face export: a folder that loads on its own."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lightrft.models.lora import adapter_config, write_adapter

MODEL_CARD = "README.md"


@dataclass(frozen=True)
class HFFiles:
    """What a model's folder holds besides its configuration and its weights."""

    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig | None
    """None where the base model has none."""
    card: str
    """Text of the model card."""
    processor: ProcessorMixin | None = None
    """Of a model that takes media; it has the tokenizer too."""


def export_hf(
    model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, files: HFFiles, folder: Path
) -> None:
    """Writes weights, configuration and files under a temporary name, then renames.

    Args:
        model: Gives configuration and class; its own weights, which may be shards, are not read.
        weights: Full tensors by Hugging Face name.
        dtype: That of the weights.
        files: What else belongs to the folder.
        folder: Is replaced if it is there.
    """
    with _replaced(folder) as partial:
        model.save_pretrained(partial, state_dict={name: tensor.contiguous() for name, tensor in weights})
        _set_dtype(partial / "config.json", dtype)
        write_hf_files(files, partial)


def export_adapter(model: PreTrainedModel, weights: Mapping[str, Tensor], files: HFFiles, folder: Path) -> None:
    """Writes a model's adapter as a peft folder, under a temporary name, then renames.

    Args:
        model: Gives the adapter's settings; its own weights are not read.
        weights: Full tensors of the adapter by their names in the model.
        files: What else belongs to the folder.
        folder: Is replaced if it is there.
    """
    with _replaced(folder) as partial:
        write_adapter(adapter_config(model), weights, partial)
        write_hf_files(files, partial)


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `folder` once that has gone well."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)


def write_hf_files(files: HFFiles, folder: Path) -> None:
    (files.processor or files.tokenizer).save_pretrained(folder)
    if files.generation_config is not None:
        # save_pretrained would refuse settings that contradict each other, which published models have.
        files.generation_config.to_json_file(folder / "generation_config.json")
    (folder / MODEL_CARD).write_text(files.card, encoding="utf-8")


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    # transformers notes the dtype of the live model, which may be that of its fp32 master weights.
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
