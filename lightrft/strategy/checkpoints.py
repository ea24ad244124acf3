"""Checkpoints of a strategy's roles, which are complete or not there, and exports of the actor from live weights."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lightrft.strategy.roles import TrainedRole, hf_model_of, model_of
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.checkpoint import HFFiles, export_adapter, export_hf
from lightrft.strategy.utils.checkpoint_folder import discard, open_partial, partial_of, publish
from lightrft.strategy.utils.collectives import PhaseError
from lightrft.strategy.utils.optimization import set_scheduler_steps
from lightrft.utils.logging import get_logger
from lightrft.utils.rng import rng_state, set_rng_state

logger = get_logger(__name__)

ROLES, HF, PROGRESS = "roles", "hf", "progress.pt"
"""In a checkpoint: sharded weights and optimizer state, the exported model, and what else the strategy keeps."""


def save_checkpoint(
    strategy: StrategyBase,
    folder: Path,
    roles: Sequence[TrainedRole],
    write_files: Callable[[Path], None],
    export: Callable[[Path], None] | None = None,
) -> None:
    """Writes a complete checkpoint, or leaves nothing of it. Every rank must call it.

    Args:
        strategy: The one that has the roles.
        folder: On a file system that all ranks share.
        roles: Models with their optimizers and schedulers.
        write_files: Adds the caller's own files to the folder that it gets, on rank 0 alone.
        export: Adds a model's folder at the path that it gets; it is called on every rank.

    Raises:
        PhaseError: On all ranks, if any could not write.
    """
    partial, collectives = partial_of(folder), strategy.collectives
    try:
        with collectives.collect(f"opening {folder}"):
            if strategy.is_rank_0:
                open_partial(folder)
        with collectives.collect(f"opening {folder}"):
            if not partial.is_dir():
                raise OSError(f"checkpoints need a file system that all nodes share: {partial} is not there.")
        with strategy.critic_on_device(model_of("critic", roles)):
            strategy.save_roles(partial / ROLES, roles)
        if export is not None:
            export(partial / HF)
        states = collectives.all_gather_objects(rng_state(strategy.device))
        with collectives.collect(f"writing {folder}"):
            if strategy.is_rank_0:
                torch.save(_progress(strategy, roles) | {"rng": states}, partial / PROGRESS)
                write_files(partial)
                publish(folder)
    except PhaseError:
        if strategy.is_rank_0:
            discard(partial)
        raise


def load_checkpoint(strategy: StrategyBase, folder: Path, roles: Sequence[TrainedRole]) -> None:
    """Restores models, optimizers, schedulers and random states. Every rank must call it."""
    names = strategy.collectives.all_gather_objects(folder.name)
    if len(set(names)) > 1:
        raise RuntimeError(f"ranks must load the same checkpoint: they found {', '.join(names)}.")
    with strategy.critic_on_device(model_of("critic", roles)):
        strategy.load_roles(folder / ROLES, roles)
    with strategy.collectives.collect(f"reading {folder}"):
        saved = torch.load(folder / PROGRESS, weights_only=True)
    for role in roles:
        set_scheduler_steps(role.scheduler, saved["scheduler_steps"][role.name])
    strategy.nonfinite_in_a_row = saved["nonfinite_in_a_row"]
    states = saved["rng"]
    if len(states) != strategy.world_size and strategy.is_rank_0:
        # Sampling and minibatches are keyed, so results do not depend on these states.
        logger.info(
            "%s was saved at WORLD_SIZE=%d and is loaded at %d: all ranks take the random states of rank 0",
            folder.name,
            len(states),
            strategy.world_size,
        )
    set_rng_state(states[strategy.rank if len(states) == strategy.world_size else 0], strategy.device)


def _progress(strategy: StrategyBase, roles: Sequence[TrainedRole]) -> dict[str, dict[str, int]]:
    steps = {role.name: role.scheduler.last_epoch for role in roles}
    return {"scheduler_steps": steps, "nonfinite_in_a_row": strategy.nonfinite_in_a_row}


def save_pretrained(strategy: StrategyBase, actor: nn.Module, files: HFFiles, folder: Path) -> None:
    """Writes the actor as a Hugging Face folder, in the engine's dtype. Every rank must call it."""
    kept = _on_host(strategy, strategy.named_weights(actor, strategy.engine_dtype))
    with strategy.collectives.collect(f"saving {folder}"):
        if strategy.is_rank_0:
            export_hf(hf_model_of(actor), kept.items(), strategy.engine_dtype, files, folder)


def save_adapter(strategy: StrategyBase, actor: nn.Module, files: HFFiles, folder: Path) -> None:
    """Writes the actor's adapter as a peft folder, in its own dtype. Every rank must call it."""
    kept = _on_host(strategy, strategy.named_adapter(actor))
    with strategy.collectives.collect(f"saving {folder}"):
        if strategy.is_rank_0:
            export_adapter(hf_model_of(actor), kept, files, folder)


def _on_host(strategy: StrategyBase, weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Rank 0's copies of full weights; the other ranks take part."""
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in weights:
            if strategy.is_rank_0:
                kept[name] = tensor.to("cpu", copy=True)
    return kept
