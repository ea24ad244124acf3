"""Moves: memory of a role that learns on DeepSpeed, between device and host."""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightrft.strategy.deepspeed.fragments import flats_of
from lightrft.strategy.deepspeed.library import offload_states
from lightrft.strategy.utils.host_buffers import HostBuffers


class Moves:
    """Of one engine: its weights, which it computes with, and its optimizer's masters and moments, apart.

    Args:
        engine: A DeepSpeedEngine.
        optimizer: The one that the engine was made with.
        host_buffers: Where masters and moments wait.
    """

    def __init__(self, engine: Any, optimizer: Optimizer, host_buffers: HostBuffers) -> None:
        states = offload_states()
        self.engine = engine
        self.optimizer = optimizer
        self.host_buffers = host_buffers
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
            self._move_flats(self.host_buffers.to_host)

    def reload_optimizer(self) -> None:
        self._reload(self.rest)
        if self.moves_flats:
            self._move_flats(lambda _, tensor: self.host_buffers.to_device(tensor))

    def _offload(self, states: set[Any]) -> None:
        self.engine.offload_states(include=states, pin_memory=self.host_buffers.device.type == "cuda")

    def _reload(self, states: set[Any]) -> None:
        # It brings everything that it knows to be away.
        away = self.engine.optimizer.offloaded_states
        others = away - states
        away -= others
        self.engine.reload_states()
        away |= others

    def _move_flats(self, move: Callable[[Hashable, Tensor], Tensor]) -> None:
        for flat in flats_of(self.engine, self.optimizer):
            flat.data = move(flat, flat.data)
        for flat, state in self.optimizer.state.items():
            state |= {name: move((flat, name), value) for name, value in state.items() if _is_moment(value)}
        self.host_buffers.wait()


def _is_moment(value: object) -> bool:
    """The count of steps stays where the optimizer put it."""
    return isinstance(value, Tensor) and value.ndim > 0
