"""Weight loading: what a model's own weight loaders write into its parameters, seen at the copies that they make."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft.types import WeightBucket, WeightSpec

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by the bytes of an element."""


class WeightLoading(Protocol):
    """An engine's model: parameters of its own layout, and loaders that take Hugging Face's weights."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> Any: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


@torch.no_grad()
def load(model: WeightLoading, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies the tensors through the model's loaders."""
    # New tensor objects: loaders leave attributes on them, and the caller's may come again under another name.
    model.load_weights((name, tensor.detach()) for name, tensor in weights)


def changed_weights(model: WeightLoading, bucket: WeightBucket) -> list[str]:
    """Loads weights once more: the names of those that changed a bit of a parameter, or reached none."""
    changes: dict[str, list[Tensor]] = {name: [] for name, _ in bucket}
    with CopyWatch(model, bucket, lambda name, target, source: changes[name].append(_differs(target, source))) as watch:
        load(model, watch.weights)
    return [name for name, flags in changes.items() if not flags or bool(torch.stack(flags).any())]


def check_one_to_one(model: WeightLoading, specs: Sequence[WeightSpec], device: torch.device, engine: str) -> None:
    """Loads zeros for every spec, and so finds out whether they are all that the model has; its values are lost.

    Raises:
        NotImplementedError: Weights that reach no parameter, or parameters that no weight reaches, named. Quantised
            weights and those in a kernel's own layout are such.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(torch.nan)
    # One number each, repeated by strides of 0: whole models of zeros take no memory.
    zeros: WeightBucket = [
        (spec.name, torch.zeros((), dtype=spec.dtype, device=device).expand(spec.shape)) for spec in specs
    ]
    reached: set[str] = set()
    try:
        with CopyWatch(model, zeros, lambda name, target, source: reached.add(name)) as watch:
            load(model, watch.weights)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise NotImplementedError(
            f"{engine}'s model must take the weights of Hugging Face's as they are: its loaders fail ({reason}). "
            "Set --engine_type torch."
        ) from error
    faults = [f"{spec.name} reaches no parameter" for spec in specs if spec.name not in reached]
    faults += [
        f"{name} is reached by no weight, or in part"
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and bool(parameter.isnan().any())
    ]
    if faults:
        raise NotImplementedError(
            f"{engine}'s model must have the weights of Hugging Face's, one to one: {'; '.join(faults[:5])}. "
            "Set --engine_type torch."
        )


class CopyWatch(TorchDispatchMode):
    """Calls `on_copy(name, target, source)` before each copy of a sent weight into a parameter of the model.

    The name is that of the tensor whose memory is copied, or of the latest one that the loaders took where they copy
    from something they made of it.
    """

    def __init__(
        self, model: WeightLoading, bucket: WeightBucket, on_copy: Callable[[str, Tensor, Tensor], None]
    ) -> None:
        super().__init__()
        self._sent = bucket
        self._on_copy = on_copy
        self._targets = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._extents = sorted((tensor.data_ptr(), _end(tensor), name) for name, tensor in bucket)
        self._latest = ""

    @property
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What to load: the bucket's weights one by one, so that the latest is known."""
        for name, tensor in self._sent:
            self._latest = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() in self._targets:
            target, source = args[:2]
            self._on_copy(self._name_of(source), target, source)
        return func(*args, **(kwargs or {}))

    def _name_of(self, source: Tensor) -> str:
        address = source.data_ptr()
        index = bisect_right(self._extents, address, key=lambda extent: extent[0]) - 1
        start, end, name = self._extents[index]
        return name if start <= address < end else self._latest


def _end(tensor: Tensor) -> int:
    """Address behind the tensor's last element."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (steps + 1) * tensor.element_size()


def _differs(target: Tensor, source: Tensor) -> Tensor:
    """Whether a copy would change a bit of the target: a bool on its device."""
    bits = _BITS[target.element_size()]
    return (target.view(bits) != source.to(target.device, target.dtype).view(bits)).any()
