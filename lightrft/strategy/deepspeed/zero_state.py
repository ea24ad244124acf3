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
from lightrft.strategy.deepspeed.library import gathered
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
        """This rank's rows of masters and moments, on the host, and what does not learn, whole."""
        tensors = self._frozen()
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
        load_tensors(folder, self._frozen() | targets | steps)
        self._clear_moments(max(steps.values(), default=None))
        for layer in _by_layer(self.fragments):
            for entry in ENTRIES:
                self._install([f for f in layer if self._name(f, entry) in saved], entry, targets)

    def _install(self, fragments: Sequence[Fragment], entry: Entry, targets: dict[str, Tensor]) -> None:
        rows = [targets[self._name(f, entry)] for f in fragments]
        wholes = gather_rows(
            [row.to_local() for row in rows if isinstance(row, DTensor)],
            [f.shape for f in fragments],
            [row.dtype for row in rows],
            self.collectives.device,
            self.collectives,
        )
        keep_parts(fragments, entry, self.optimizer, wholes)
        if entry != "master":
            return
        parameters = [f.parameter for f in fragments]
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

    def _frozen(self) -> dict[str, Tensor]:
        """Saved buffers; nothing beside an adapter."""
        every = learned_tensors(self.engine.module)
        return {f"{self.name}/weights/{key}": t.detach() for key, t in every.items() if not t.requires_grad}

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
