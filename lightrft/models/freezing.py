"""Freezing: the weights of a model that do not learn, by the beginnings of their names."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedModel

from lightrft.models.multimodal import published_name


def frozen_names(model: PreTrainedModel, prefixes: Sequence[str]) -> list[str]:
    """Parameters of which one of `prefixes` begins a name, in whole parts: `a.b` is one of a.b.c, and none of a.bc.

    A parameter has the name that it has in the model, in published folders, and in the model without its head.
    """
    return [
        name
        for name, _ in model.named_parameters()
        if any(_begins(p, n) for n in _names(model, name) for p in prefixes)
    ]


def check_freeze_prefix(model: PreTrainedModel, prefixes: Sequence[str]) -> None:
    """Raises ValueError for a prefix that begins no name, or where nothing is left to learn."""
    for prefix in prefixes:
        if not frozen_names(model, [prefix]):
            raise ValueError(
                f"freeze_prefix must begin names of weights: {prefix} begins none. Choose among "
                f"{', '.join(_beginnings(model))}, or longer ones."
            )
    frozen = set(frozen_names(model, prefixes))
    if all(name in frozen for name, _ in model.named_parameters()):
        raise ValueError(f"freeze_prefix must leave weights to learn: {', '.join(prefixes)} is all. Drop one.")


def _names(model: PreTrainedModel, name: str) -> Iterator[str]:
    yield name
    prefix = f"{model.base_model_prefix}."
    # A trunk alone lacks the prefix.
    full = name if model.base_model is not model else prefix + name
    yield published_name(model.config, full)
    yield full.removeprefix(prefix)


def _begins(prefix: str, name: str) -> bool:
    return f"{name}.".startswith(f"{prefix}.")


def _beginnings(model: PreTrainedModel) -> list[str]:
    """Names of the model's parts, and of the parts of its trunk."""
    parts = [name.removeprefix(f"{model.base_model_prefix}.").split(".")[0] for name, _ in model.named_parameters()]
    return list(dict.fromkeys(parts))
