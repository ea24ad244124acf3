"""Built-in rewards: 1 for a right answer, 0 for another."""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

NUMBER = re.compile(
    r"(?:(?<![\w)])[-−])?"  # a minus after a digit, a letter or a bracket is a subtraction or a hyphen
    r"\$?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3})?"
)


def exact_match(response: str, label: Any, finish_reason: str) -> Mapping[str, float]:
    """Whether a finished response is the label, apart from white space around it."""
    return _accuracy(finish_reason == "stop" and response.strip() == str(label).strip())


def contains_answer(response: str, label: Any) -> Mapping[str, float]:
    """Whether the label's text stands in the response; an empty label stands in none."""
    text = str(label).strip()
    return _accuracy(bool(text) and text in response)


def last_number(response: str, label: Any) -> Mapping[str, float] | None:
    """Whether the last number of the response is the label's; None, an excluded sample, where the label has none."""
    expected = _last_number(str(label))
    return None if expected is None else _accuracy(_last_number(response) == expected)


REWARDS: dict[str, Callable[..., Mapping[str, float] | None]] = {
    "exact_match": exact_match,
    "contains_answer": contains_answer,
    "last_number": last_number,
}


def _accuracy(right: bool) -> Mapping[str, float]:
    return {"score": float(right), "accuracy": float(right)}


def _last_number(text: str) -> Decimal | None:
    """The value as written, so that 1,234 and $1,234.00 are equal and nothing is rounded."""
    numbers = NUMBER.findall(text)
    return Decimal(re.sub("[$,]", "", numbers[-1]).replace("−", "-")) if numbers else None
