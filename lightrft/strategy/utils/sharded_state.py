"""Sharded state: weights and optimizer state of roles, saved by PyTorch's distributed checkpoint (DCP).

Names are `<role>/weights/<parameter>` and `<role>/optimizer/<parameter>/<key>`. Every rank writes its own shards, and
any number of ranks, one process without a group as well, reads them.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from lightrft.models.lora import learned_tensors
from lightrft.strategy.utils.collectives import PhaseError


def role_weights(name: str, model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, or an adapter alone, by their names in a checkpoint."""
    return {f"{name}/weights/{key}": tensor.detach() for key, tensor in learned_tensors(model).items()}


def optimizer_state(name: str, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """What the optimizer holds for each parameter; nothing before its first step.

    DCP's own `get_state_dict` would take a step to have something to save, and count it.
    """
    return {
        f"{name}/optimizer/{key}/{entry}": value
        for key, parameter in model.named_parameters()
        for entry, value in optimizer.state.get(parameter, {}).items()
    }


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Every rank of the default group must call it.

    Raises:
        PhaseError: On all ranks, if any could not write.
    """
    try:
        dcp.save(dict(tensors), storage_writer=FileSystemWriter(folder, sync_files=True, thread_count=1))
    except CheckpointException as error:
        raise PhaseError(f"writing {folder} failed: {error}") from error


def load_tensors(folder: Path, targets: Mapping[str, Tensor], alone: bool = False) -> None:
    """Fills the targets in place. Every rank of the default group must call it, or one process `alone`.

    Raises:
        PhaseError: On all ranks, if any could not read, or lacks a target.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(dict(targets), storage_reader=FileSystemReader(folder), no_dist=alone)
    except CheckpointException as error:
        raise PhaseError(f"reading {folder} failed: {error}") from error


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Full shape of every saved tensor."""
    return {name: tuple(saved.size) for name, saved in _saved(folder)}


def load_optimizer_state(folder: Path, name: str, model: nn.Module, optimizer: Optimizer, on_host: bool) -> None:
    """Every rank must call it.

    Args:
        folder: Where the tensors were saved.
        name: Of the role.
        model: Owner of the parameters.
        optimizer: Its state is replaced.
        on_host: Shards of the state go to the host, wherever the parameters are.
    """
    targets = dict(_optimizer_targets(folder, name, model, on_host))
    load_tensors(folder, targets)
    optimizer.state.clear()
    for key, parameter in model.named_parameters():
        prefix = f"{name}/optimizer/{key}/"
        state = {saved.removeprefix(prefix): value for saved, value in targets.items() if saved.startswith(prefix)}
        if state:
            optimizer.state[parameter] = state


def shape_faults(saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What keeps saved weights out of a model: `saved` may hold more than weights."""
    weights = {name: shape for name, shape in saved.items() if "/weights/" in name}
    missing = [f"{name} is not in it" for name in wanted if name not in weights]
    extra = [f"{name} is not in the model" for name in weights if name not in wanted]
    other = [
        f"{name} is {weights[name]} there and {shape} here"
        for name, shape in wanted.items()
        if name in weights and weights[name] != shape
    ]
    return [*other, *missing, *extra]


def _saved(folder: Path) -> Iterable[tuple[str, TensorStorageMetadata]]:
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return [(name, entry) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]


def _optimizer_targets(folder: Path, name: str, model: nn.Module, on_host: bool) -> Iterator[tuple[str, Tensor]]:
    """Empty tensors for every saved entry: laid out as the parameter, or, where it is a number, on the host."""
    parameters = dict(model.named_parameters())
    prefix = f"{name}/optimizer/"
    for saved_name, saved in _saved(folder):
        if not saved_name.startswith(prefix):
            continue
        parameter = parameters[saved_name.removeprefix(prefix).rpartition("/")[0]]
        dtype = saved.properties.dtype
        if tuple(saved.size) == tuple(parameter.shape):
            zeros = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            yield saved_name, zeros.to("cpu") if on_host else zeros
        else:
            yield saved_name, torch.zeros(saved.size, dtype=dtype)
