"""ZeRO state: weights and optimizer state of a role on DeepSpeed, under the names and in the rows that FSDP2 saves.

So a checkpoint belongs to no backend, no ZeRO stage and no number of ranks.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import zeros as sharded_zeros
from torch.optim import Optimizer

from lightrft.models.lora import learned_tensors
from lightrft.models.weights import layer_of
from lightrft.strategy.deepspeed.fragments import (
    ENTRIES,
    MOMENTS,
    Entry,
    Fragment,
    flats_of,
    fragments_of,
    keep_parts,
    whole_tensors,
)
from lightrft.strategy.deepspeed.library import gathered, is_cut_up
from lightrft.strategy.utils.collectives import Collectives
from lightrft.strategy.utils.gathering import gather_rows
from lightrft.strategy.utils.sharded_state import load_tensors, saved_shapes


class ZeroState:
    """The state of one role. Every rank must call its methods.

    Args:
        name: Of the role.
        engine: A DeepSpeedEngine.
        optimizer: The one that the engine was made with.
        collectives: Of all ranks.
        mesh: Of all ranks' hosts.
    """

    def __init__(
        self, name: str, engine: Any, optimizer: Optimizer, collectives: Collectives, mesh: DeviceMesh
    ) -> None:
        self.name = name
        self.engine = engine
        self.optimizer = optimizer
        self.collectives = collectives
        self.mesh = mesh
        self.fragments = fragments_of(engine, optimizer)

    def tensors(self) -> dict[str, Tensor]:
        """This rank's rows of masters and moments, on the host, and what does not learn: whole, or rows if dealt."""
        tensors = self._whole()
        for layer in _by_layer(self._dealt()):
            with gathered([part.parameter for part in layer]):
                tensors |= {self._name(part, "master"): self._rows(part.parameter.detach()) for part in layer}
        entries: list[Entry] = ["master", *(MOMENTS if self.optimizer.state else ())]
        for layer in _by_layer(self.fragments):
            for entry in entries:
                wholes = whole_tensors(layer, entry, self.optimizer, self.collectives)
                tensors |= {self._name(f, entry): self._rows(w) for f, w in zip(layer, wholes, strict=True)}
        for state in self.optimizer.state.values():
            # All weights have taken the same steps.
            tensors |= {self._step_name(fragment): state["step"].cpu() for fragment in self.fragments}
        return tensors

    def load(self, folder: Path) -> None:
        """Reads what `tensors` gives, saved by this backend or the other one."""
        saved = saved_shapes(folder)
        targets: dict[str, Tensor] = {
            name: sharded_zeros(*f.shape, device_mesh=self.mesh, placements=[Shard(0)])
            for entry in ENTRIES
            for f in self.fragments
            if (name := self._name(f, entry)) in saved
        }
        steps = {name: torch.zeros(()) for f in self.fragments if (name := self._step_name(f)) in saved}
        dealt = self._dealt()
        targets |= {
            self._name(f, "master"): sharded_zeros(
                *f.shape, dtype=f.parameter.dtype, device_mesh=self.mesh, placements=[Shard(0)]
            )
            for f in dealt
        }
        load_tensors(folder, self._whole() | targets | steps)
        for layer in _by_layer(dealt):
            self._copy([f.parameter for f in layer], self._gathered_rows(layer, "master", targets))
        self._clear_moments(max(steps.values(), default=None))
        for layer in _by_layer(self.fragments):
            for entry in ENTRIES:
                self._install([f for f in layer if self._name(f, entry) in saved], entry, targets)

    def _install(self, fragments: Sequence[Fragment], entry: Entry, targets: dict[str, Tensor]) -> None:
        wholes = self._gathered_rows(fragments, entry, targets)
        keep_parts(fragments, entry, self.optimizer, wholes)
        if entry == "master":
            self._copy([f.parameter for f in fragments], wholes)

    def _gathered_rows(
        self, fragments: Sequence[Fragment], entry: Entry, targets: dict[str, Tensor]
    ) -> Sequence[Tensor]:
        rows = [targets[self._name(f, entry)] for f in fragments]
        return gather_rows(
            [row.to_local() for row in rows if isinstance(row, DTensor)],
            [f.shape for f in fragments],
            [row.dtype for row in rows],
            self.collectives.device,
            self.collectives,
        )

    def _copy(self, parameters: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        with torch.no_grad(), gathered(parameters, source=0):
            for parameter, whole in zip(parameters, wholes, strict=True):
                parameter.copy_(whole)

    def _clear_moments(self, step: Tensor | None) -> None:
        self.optimizer.state.clear()
        if step is None:
            return
        for flat in flats_of(self.engine, self.optimizer):
            moments = {entry: torch.zeros_like(flat, requires_grad=False) for entry in MOMENTS}
            self.optimizer.state[flat] = {"step": step.clone(), **moments}

    def _frozen(self) -> Iterator[tuple[str, Any]]:
        """Saved buffers and weights that do not learn; nothing beside an adapter."""
        return ((key, t) for key, t in learned_tensors(self.engine.module).items() if not t.requires_grad)

    def _whole(self) -> dict[str, Tensor]:
        """What does not learn and is whole on every rank."""
        return {f"{self.name}/weights/{key}": t.detach() for key, t in self._frozen() if not is_cut_up(t)}

    def _dealt(self) -> list[Fragment]:
        """What does not learn and is cut up by ZeRO-3."""
        return [Fragment(key, t, t.ds_shape, flat=None) for key, t in self._frozen() if is_cut_up(t)]

    def _rows(self, whole: Tensor) -> Tensor:
        chunks = whole.chunk(self.mesh.size())
        rank = self.mesh.get_local_rank()
        rows = chunks[rank] if rank < len(chunks) else whole[:0]
        return DTensor.from_local(
            rows.to("cpu", copy=True),
            self.mesh,
            [Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def _name(self, fragment: Fragment, entry: Entry) -> str:
        if entry == "master":
            return f"{self.name}/weights/{fragment.name}"
        return f"{self.name}/optimizer/{fragment.name}/{entry}"

    def _step_name(self, fragment: Fragment) -> str:
        return f"{self.name}/optimizer/{fragment.name}/step"


def _by_layer(fragments: Sequence[Fragment]) -> Iterator[list[Fragment]]:
    for _, members in groupby(fragments, key=lambda fragment: layer_of(fragment.name)):
        yield list(members)
