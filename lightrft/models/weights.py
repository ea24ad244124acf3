"""Weights of a model as others know them: full tensors by their Hugging Face names, a layer at a time."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor, nn


def persistent_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers; a tied parameter comes once."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def layer_of(name: str) -> str:
    """What comes before and with the first number in a weight's name: `model.layers.3`; empty outside of layers."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def by_layer(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Named tensors in their order, those of a layer together."""
    for _, members in groupby(tensors, key=lambda pair: layer_of(pair[0])):
        yield list(members)


def sent_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """`dtype` for numbers of weights; counters and masks keep theirs."""
    return dtype if tensor.is_floating_point() else tensor.dtype
