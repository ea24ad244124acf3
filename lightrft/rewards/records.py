"""Records that reward functions take and give."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RESERVED_COMPONENTS = ("mean", "mean_square", "std", "excluded", "reward", "response_length", "truncated")
"""What metrics say of the score itself and of the response, under the same prefix as the components."""


@dataclass(frozen=True)
class RewardInput:
    """One response to be rewarded, with what its row of the data set says."""

    prompt: str
    response: str
    label: Any
    reference: Any
    extra: Mapping[str, Any]
    """The row's other columns, untouched."""
    row: int
    """Index of the row in its file: errors name it."""
    finish_reason: str
    """`stop` or `length`."""


@dataclass(frozen=True)
class RewardOutput:
    """What one response is worth."""

    score: float | None
    """None = excluded: outside the group statistics and the loss."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, for metrics and samples.jsonl."""
