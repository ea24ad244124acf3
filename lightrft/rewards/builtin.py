"""Built-in rewards: 1 for a right answer, 0 for another."""

from collections.abc import Callable, Mapping
from typing import Any

from lightrft.rewards import quantities


def exact_match(response: str, label: Any, finish_reason: str) -> Mapping[str, float]:
    """Whether a finished response is the label, apart from white space around it."""
    return _accuracy(finish_reason == "stop" and response.strip() == str(label).strip())


def contains_answer(response: str, label: Any) -> Mapping[str, float]:
    """Whether the label's text stands in the response; an empty label stands in none."""
    text = str(label).strip()
    return _accuracy(bool(text) and text in response)


def last_number(response: str, label: Any) -> Mapping[str, float] | None:
    """Whether the last number of the response is the label's; None, an excluded sample, where the label has none."""
    expected = quantities.last_number(str(label))
    return None if expected is None else _accuracy(quantities.last_number(response) == expected)


REWARDS: dict[str, Callable[..., Mapping[str, float] | None]] = {
    "exact_match": exact_match,
    "contains_answer": contains_answer,
    "last_number": last_number,
}


def _accuracy(right: bool) -> Mapping[str, float]:
    return {"score": float(right), "accuracy": float(right)}
