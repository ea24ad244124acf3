"""Flags: the fields of the owner dataclasses in one flat name space."""

import re
from typing import Any, get_type_hints

from lightrft.config.arguments import Config

FLAG_LIKE = re.compile(r"--$|-+[^\W\d_]")
"""What the command line's parser takes for a flag; a negative number is none."""


def flag_types(config_type: type = Config) -> dict[str, Any]:
    """Each flag's name and type, in the order of the help text."""
    owners = get_type_hints(config_type).values()
    return {name: kind for owner in owners for name, kind in get_type_hints(owner).items()}


def flag_values(config: Any) -> dict[str, Any]:
    """Each flag's name and value, in the order of the help text, of a Config or another dataclass of owners."""
    return {name: value for owner in vars(config).values() for name, value in vars(owner).items()}


def is_flag(token: str) -> bool:
    """Whether the command line's parser takes the token for a flag, and not for a value."""
    return FLAG_LIKE.match(token) is not None


def spelling(token: str) -> str:
    """A token without its `=value`, as the help text spells flags."""
    flag = token.partition("=")[0]
    return "--" + flag[2:].replace("-", "_") if flag.startswith("--") else flag


def field_of_spelling(config_type: type = Config) -> dict[str, str]:
    """The name of its field for each way to write a flag; `config` is the configuration file's."""
    kinds = flag_types(config_type)
    switches = [name for name, kind in kinds.items() if kind is bool]
    return {
        **{f"--{name}": name for name in (*kinds, "config")},
        **{f"--no_{name}": name for name in switches},
        "--disable_engine_sleep": "enable_engine_sleep",
    }
