"""Flags: the fields of the owner dataclasses in one flat name space."""

from typing import Any, get_type_hints

from lightrft.config.arguments import Config


def flag_types() -> dict[str, Any]:
    """Each flag's name and type, in the order of the help text."""
    return {name: kind for owner in get_type_hints(Config).values() for name, kind in get_type_hints(owner).items()}


def flag_values(config: Config) -> dict[str, Any]:
    """Each flag's name and value, in the order of the help text."""
    return {name: value for owner in vars(config).values() for name, value in vars(owner).items()}
