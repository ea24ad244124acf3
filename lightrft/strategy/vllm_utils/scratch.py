"""Scratch memory: tensors that vLLM's model and its runner keep beside parameters and buffers.

Made together with the weights, they are dropped with them at sleep level 2. vLLM brings buffers back, and nothing else:
the tensors of Qwen3-VL's deeper layers, which every step adds to its own, or positions behind those of a short step
would then be whatever the memory holds.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

_RUNNER_PACKAGE = "vllm.v1.worker.gpu"
"""Of the newer of vLLM's two runners, whose parts are objects of their own."""


class Scratch:
    """What such tensors hold after vLLM's start, before anything sleeps."""

    def __init__(self, model: nn.Module, parts: Sequence[object], kv_caches: Sequence[Tensor]) -> None:
        """`parts` are objects of the runner that it made with the model; KV caches sleep on their own."""
        known = (*kv_caches, *model.parameters(), *model.buffers())
        others = {tensor.untyped_storage().data_ptr() for tensor in known}
        found = [*_of_modules(model), *_of_parts(parts, set())]
        self.tensors = [t for t in found if t.numel() and t.untyped_storage().data_ptr() not in others]
        # Most are large and zero.
        self._values = [tensor.to("cpu", copy=True) if tensor.count_nonzero() else None for tensor in self.tensors]

    @torch.inference_mode()
    def restore(self) -> None:
        for tensor, value in zip(self.tensors, self._values, strict=True):
            if value is None:
                tensor.zero_()
            else:
                tensor.copy_(value)


def _of_modules(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        registered = ("_parameters", "_buffers", "_modules")
        yield from _of_values([value for name, value in vars(module).items() if name not in registered])


def _of_values(values: Sequence[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _of_values(value)


def _of_parts(parts: Sequence[object], seen: set[int]) -> Iterator[Tensor]:
    for part in parts:
        if id(part) in seen or not type(part).__module__.startswith(_RUNNER_PACKAGE):
            continue
        seen.add(id(part))
        yield from _of_values(list(vars(part).values()))
        yield from _of_parts(list(vars(part).values()), seen)
