"""Alternatives: choices, as a message lists them."""

from collections.abc import Iterable


def alternatives(choices: Iterable[object]) -> str:
    """`1, 2 or 3`; None is no choice."""
    *others, last = [str(choice) for choice in choices if choice is not None]
    return f"{', '.join(others)} or {last}" if others else last
