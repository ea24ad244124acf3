"""The KV cache of a decode: Hugging Face's, with room for the tokens to come."""

from typing import Any

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


class RoomyLayer(DynamicLayer):
    """Appends tokens in place, where `DynamicLayer` copies all earlier ones at each step."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is the most tokens that a row will have, prompt and padding included."""
        super().__init__()
        self._capacity = capacity
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        if start == 0:
            # The prompts come once, and their rows are repeated before the first append.
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return key_states, value_states
        if self._buffers is None:
            assert self.keys is not None and self.values is not None
            self._buffers = self._with_room(self.keys), self._with_room(self.values)
        end = start + key_states.shape[-2]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._buffers = None

    def _with_room(self, states: Tensor) -> Tensor:
        """`(B, heads, capacity, head size)`, filled as far as `states` goes."""
        batch, heads, length, size = states.shape
        buffer = states.new_empty(batch, heads, self._capacity, size)
        buffer[:, :, :length] = states
        return buffer


def roomy_cache(config: PretrainedConfig, capacity: int) -> DynamicCache:
    """An empty cache whose full-attention layers hold up to `capacity` tokens; layers of other kinds stay theirs."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of the keys and values in all layers."""
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    return sum(states.nbytes for layer in layers for states in (layer.keys, layer.values) if states is not None)
