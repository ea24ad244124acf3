"""Options of rules: what a recipe may set them to."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limit:
    """What an option must be, in words, and whether a value is it."""

    words: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_tags(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(tag, str) and tag and not set(tag) & set("<>/") for tag in value)
        and len(set(value)) == len(value)
    )


FLAG = Limit("true or false", lambda value: isinstance(value, bool))
COUNT = Limit("a whole number of at least 0", lambda value: _is_whole(value) and value >= 0)
POSITIVE = Limit("a whole number above 0", lambda value: _is_whole(value) and value > 0)
LIMITS: dict[str, dict[str, Limit]] = {
    "exact": {"ignore_case": FLAG},
    "fuzzy": {
        "ignore_case": FLAG,
        "threshold": Limit("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1),
    },
    "code": {
        "all_or_nothing": FLAG,
        "seconds": Limit("a number above 0", lambda value: _is_number(value) and 0 < value < math.inf),
        "memory_mib": POSITIVE,
        "processes": COUNT,
    },
    "format": {"tags": Limit("a list of different names, without < and >", _are_tags)},
    "length": {"max_length": COUNT, "min_length": COUNT},
    "overlong": {"max_length": POSITIVE, "buffer": POSITIVE},
}
"""By rule and option."""


def check_rule_options(rule: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError where a recipe sets a rule's option to what the rule cannot use."""
    limits = LIMITS.get(rule, {})
    for name, value in options.items():
        if name in limits and not limits[name].holds(value):
            raise ValueError(
                f"{name} must be {limits[name].words}: reward_recipe has {value!r:.80} for {rule}. Change it."
            )
    if rule == "length" and options.get("min_length", 0) > options.get("max_length", math.inf):
        raise ValueError(
            f"min_length must not exceed max_length: reward_recipe has {options['min_length']} and "
            f"{options['max_length']} for length. Change one of them."
        )
    if rule == "overlong" and options.get("buffer", 0) > options.get("max_length", math.inf):
        raise ValueError(
            f"buffer must not exceed max_length, of which it is the last part: reward_recipe has {options['buffer']} "
            f"and {options['max_length']} for overlong. Change one of them."
        )
