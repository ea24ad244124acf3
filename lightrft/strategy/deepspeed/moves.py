"""Moves: memory of a role that learns on DeepSpeed, between device and host."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightrft.strategy.deepspeed.fragments import flats_of
from lightrft.strategy.deepspeed.library import offload_states


class Moves:
    """Of one engine: its weights, which it computes with, and its optimizer's masters and moments, apart.

    Args:
        engine: A DeepSpeedEngine.
        optimizer: The one that the engine was made with.
        device: Of this rank.
    """

    def __init__(self, engine: Any, optimizer: Optimizer, device: torch.device) -> None:
        states = offload_states()
        self.engine = engine
        self.optimizer = optimizer
        self.device = device
        self.weights = {states.lp_params}
        self.rest = {states.lp_grads, states.optim_states, states.hp_params}
        self.moves_flats = engine.zero_optimization_stage() == 3
        if self.moves_flats:
            # Of these DeepSpeed moves only those of its own FusedAdam, which needs a CUDA compiler.
            self.rest = {states.lp_grads, states.contiguous_grad_buffer}

    def offload_weights(self) -> None:
        self._offload(self.weights)

    def reload_weights(self) -> None:
        self._reload(self.weights)

    def offload_optimizer(self) -> None:
        self._offload(self.rest)
        if self.moves_flats:
            self._move_flats(torch.device("cpu"))

    def reload_optimizer(self) -> None:
        self._reload(self.rest)
        if self.moves_flats:
            self._move_flats(self.device)

    def _offload(self, states: set[Any]) -> None:
        self.engine.offload_states(include=states, pin_memory=self.device.type == "cuda")

    def _reload(self, states: set[Any]) -> None:
        # It brings everything that it knows to be away.
        away = self.engine.optimizer.offloaded_states
        others = away - states
        away -= others
        self.engine.reload_states()
        away |= others

    def _move_flats(self, device: torch.device) -> None:
        for flat in flats_of(self.engine, self.optimizer):
            flat.data = flat.data.to(device)
        for state in self.optimizer.state.values():
            state |= {key: value.to(device) for key, value in state.items() if _is_moment(value)}


def _is_moment(value: object) -> bool:
    """The count of steps stays where the optimizer put it."""
    return isinstance(value, Tensor) and value.ndim > 0
