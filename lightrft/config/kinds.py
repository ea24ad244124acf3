"""Kinds of values: what the annotation of a flag admits. A command line makes no others, Python code may."""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightrft.config.arguments import Config
from lightrft.config.flags import flag_types, flag_values

UNIONS = (UnionType, Union)
"""What `get_origin` gives for `int | None`, and for `Literal[1, 2] | None`."""
NAMES = {
    str: ("a text", "texts"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("True or False", "truth values"),
}
"""A kind, as a message calls one and several of them."""


def kind_errors(config: Any, config_type: type = Config) -> Iterator[str]:
    """Values that are not what their flags' annotations say."""
    if not isinstance(config, config_type):
        wanted = config_type.__name__
        yield f"config must be a {wanted}: got {type(config).__name__}. Write {wanted}(model=..., data=...)."
        return
    wrong = {
        name: (kind, vars(config)[name])
        for name, kind in get_type_hints(config_type).items()
        if not isinstance(vars(config)[name], kind)
    }
    for name, (kind, value) in wrong.items():
        yield f"{name} must be a {kind.__name__}: got {type(value).__name__}. Write {name}={kind.__name__}(...)."
    if wrong:
        return
    kinds = flag_types(config_type)
    for name, value in flag_values(config).items():
        if not _is_a(value, kinds[name]):
            yield f"{name} must be {_described(kinds[name])}: {name}={value!r}. Change {name}."


def _is_a(value: Any, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in UNIONS:
        return any(_is_a(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in parts)
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return False
        item, *others = parts
        return (others == [...] or len(value) == len(parts)) and all(_is_a(each, item) for each in value)
    # True is an int for Python, and no number of anything.
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _described(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is tuple:
        count = "" if parts[1] is ... else f"{len(parts)} "
        return f"a tuple of {count}{NAMES[parts[0]][1]}"
    names = [name for part in (parts if origin in UNIONS else [kind]) for name in _alternatives(part)]
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def _alternatives(kind: Any) -> list[str]:
    """Names of what one part of a union admits."""
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    return ["None"] if kind is NoneType else [NAMES[kind][0]]
