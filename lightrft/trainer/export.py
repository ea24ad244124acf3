"""Export of a checkpoint as a Hugging Face folder, in one process on the CPU."""

from pathlib import Path
from typing import Literal, TypeAlias

import torch

from lightrft.models.loading import (
    empty_model,
    load_config,
    load_generation_config,
    load_tokenizer,
    persistent_tensors,
)
from lightrft.strategy.strategy_base import ROLES
from lightrft.strategy.utils.checkpoint import HFFiles, export_hf
from lightrft.strategy.utils.checkpoint_folder import MARK, fault, newest_complete
from lightrft.strategy.utils.sharded_state import load_tensors
from lightrft.trainer.checkpointing import BASE, model_card, read_state

DtypeName: TypeAlias = Literal["bf16", "fp32"]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export_checkpoint(path: Path, output: Path, dtype_name: DtypeName | None = None) -> Path:
    """Writes the actor of a checkpoint to `output`, and returns the checkpoint's folder.

    Args:
        path: A checkpoint, or a folder of checkpoints or of a run, whose newest complete one is taken.
        output: The new folder.
        dtype_name: Of the weights; None takes what the run computed in.

    Raises:
        ValueError: There is no complete checkpoint, or `output` is not empty.
    """
    folder = find_checkpoint(path)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"the output must be a new folder: {output} is there already. Choose another one.")
    state = read_state(folder)
    dtype = _DTYPES[dtype_name or ("bf16" if state.flags["bf16"] else "fp32")]
    base = str(folder / BASE)
    model = empty_model(load_config(base, "padded"), "causal_lm", dtype)
    weights = {name: torch.empty_like(tensor, device="cpu") for name, tensor in persistent_tensors(model)}
    load_tensors(
        folder / ROLES, {f"actor/weights/model.{name}": tensor for name, tensor in weights.items()}, alone=True
    )
    card = model_card(state.flags["pretrain"], state.step, state.flags)
    files = HFFiles(load_tokenizer(base), load_generation_config(base), card)
    output.parent.mkdir(parents=True, exist_ok=True)
    export_hf(model, weights.items(), dtype, files, output)
    return folder


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
