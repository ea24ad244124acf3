"""WeightRound: the weights that an engine expects in a round of updates, and those still missing."""

from collections.abc import Iterable, Mapping, Sequence

from lightrft.types import WeightBucket, WeightSpec

Shapes = Mapping[str, tuple[int, ...]]


class WeightRound:
    """Bookkeeping of an engine's `check_weights`, `update_weights` and `finish_weight_update`."""

    def __init__(self, shapes: Shapes) -> None:
        """`shapes` are those of the engine's weights, under the names that they are sent by."""
        self._shapes = shapes
        self._missing = set(shapes)

    def open(self, specs: Sequence[WeightSpec]) -> None:
        """Raises ValueError where the announced weights are not the engine's."""
        self._missing = set(self._shapes)
        if faults := spec_faults(specs, self._shapes):
            raise ValueError(f"the weights sent must be the engine's, one to one: {'; '.join(faults)}.")

    def check(self, bucket: WeightBucket) -> None:
        """Raises ValueError for a name or shape that is not the engine's."""
        for name, tensor in bucket:
            shape = self._shapes.get(name)
            if shape != tuple(tensor.shape):
                held = "no such weight" if shape is None else f"the shape {shape}"
                raise ValueError(f"weight {name} was sent with shape {tuple(tensor.shape)}; the engine has {held}.")

    def note(self, bucket: WeightBucket) -> None:
        """The bucket is loaded, or on its way."""
        self._missing -= {name for name, _ in bucket}

    def miss(self, names: Iterable[str]) -> None:
        """These will not arrive."""
        self._missing |= set(names)

    def close(self) -> None:
        """Raises RuntimeError where a weight got no update."""
        if self._missing:
            raise RuntimeError(f"weights of the engine got no update: {', '.join(sorted(self._missing))}.")
        self._missing = set(self._shapes)


def spec_faults(specs: Sequence[WeightSpec], shapes: Shapes) -> list[str]:
    """What is wrong with the announced weights, in words."""
    sent = {spec.name: tuple(spec.shape) for spec in specs}
    faults = [f"{name} is missing" for name in shapes if name not in sent]
    faults += [f"{name} is unknown" for name in sent if name not in shapes]
    faults += [
        f"{name} has shape {shape} and should have {shapes[name]}"
        for name, shape in sent.items()
        if name in shapes and shape != shapes[name]
    ]
    if len(sent) < len(specs):
        faults.append("a name comes twice")
    return faults
