"""Export of a checkpoint as a Hugging Face folder, in one process on the CPU."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrft.models.loading import (
    LoadedConfig,
    empty_model,
    load_config,
    load_generation_config,
    load_processor,
    load_tokenizer,
    pretrained_weights,
)
from lightrft.models.lora import Adapter, has_adapter_config, learned_tensors, read_adapter_config, sent_weights
from lightrft.strategy.checkpoints import ROLES
from lightrft.strategy.utils.checkpoint import HFFiles, export_adapter, export_hf
from lightrft.strategy.utils.checkpoint_folder import MARK, fault, newest_complete
from lightrft.strategy.utils.sharded_state import load_tensors
from lightrft.trainer.checkpointing import BASE, TrainingState, model_card, read_state

DtypeName: TypeAlias = Literal["bf16", "fp32"]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export_checkpoint(
    path: Path, output: Path, dtype_name: DtypeName | None = None, adapter_only: bool = False
) -> Path:
    """Writes the actor of a checkpoint to `output`, and returns the checkpoint's folder.

    An adapter is merged into the model that the run started from, which must be where it was.

    Args:
        path: A checkpoint, or a folder of checkpoints or of a run, whose newest complete one is taken.
        output: The new folder.
        dtype_name: Of the weights; None takes what the run computed in.
        adapter_only: Writes the adapter, in fp32, as a peft folder.

    Raises:
        ValueError: There is no complete checkpoint or no adapter in it, `output` is not empty, or an adapter is asked
            for in a dtype.
    """
    if adapter_only and dtype_name is not None:
        raise ValueError(f"an adapter is written in fp32, as it was trained: --dtype {dtype_name}. Drop --dtype.")
    folder = find_checkpoint(path)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"the output must be a new folder: {output} is there already. Choose another one.")
    state = read_state(folder)
    run_dtype = "bf16" if state.flags["bf16"] else "fp32"
    dtype = _DTYPES[dtype_name or run_dtype]
    loaded = saved_model(folder / BASE)
    if adapter_only and loaded.adapter is None:
        raise ValueError(f"there must be an adapter to export: {folder} has all weights. Drop --adapter.")
    model = empty_model(loaded, "causal_lm", dtype)
    weights = saved_weights(folder, model)
    files = hf_files(folder, loaded, state, library="peft" if adapter_only else "transformers")
    output.parent.mkdir(parents=True, exist_ok=True)
    if adapter_only:
        export_adapter(model, weights, files, output)
        return folder
    if loaded.adapter is not None:
        origin = replace(load_config(state.flags["pretrain"], "padded"), adapter=loaded.adapter)
        weights = merged_weights(model, pretrained_weights(origin, "causal_lm", _DTYPES[run_dtype]) | weights, dtype)
    export_hf(model, weights.items(), dtype, files, output)
    return folder


def saved_weights(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint holds of the actor, by the names of `model`."""
    weights = {name: torch.empty_like(tensor, device="cpu") for name, tensor in learned_tensors(model).items()}
    targets = {f"actor/weights/model.{name}": tensor for name, tensor in weights.items()}
    load_tensors(folder / ROLES, targets, alone=True)
    return weights


def hf_files(
    folder: Path, loaded: LoadedConfig, state: TrainingState, library: Literal["transformers", "peft"]
) -> HFFiles:
    base = str(folder / BASE)
    card = model_card(state.flags["pretrain"], state.step, state.flags, library=library)
    return HFFiles(load_tokenizer(base), load_generation_config(base), card, load_processor(loaded))


def saved_model(base: Path) -> LoadedConfig:
    """The model of a checkpoint, from what it keeps besides the weights."""
    loaded = load_config(str(base), "padded")
    if not has_adapter_config(base):
        return loaded
    return replace(loaded, adapter=Adapter(read_adapter_config(base), seed=0))


def merged_weights(model: PreTrainedModel, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights by the names that they have without an adapter, from those of `model`, which takes them up."""
    model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    with torch.no_grad():
        return {
            weight.name: weight.made([part.detach().to(kind) for part, kind in weight.parts(dtype)], dtype)
            for weight in sent_weights(model)
        }


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest complete one below it.

    Raises:
        ValueError: There is none.
    """
    if (path / ROLES).exists() or (path / MARK).exists():
        if (reason := fault(path)) is not None:
            raise ValueError(f"a checkpoint must be complete: {path} is not, since {reason}. Choose another one.")
        return path
    for root in (path, path / "checkpoints"):
        if (folder := newest_complete(root)[0]) is not None:
            return folder
    raise ValueError(f"no complete checkpoint is there: {path}. Give a checkpoint, or the folder that holds them.")
