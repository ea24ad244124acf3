"""Records that rewards take and give."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, SupportsFloat, TypeAlias

RESERVED_COMPONENTS = (
    "mean",
    "mean_square",
    "std",
    "excluded",
    "ungradable",
    "failed",
    "reward",
    "response_length",
    "truncated",
)
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
    media: Mapping[str, Any] = field(default_factory=dict)
    """The row's images, clips and sounds; empty for text."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """What the prompt was made of by a chat template, for models with one of their own; None for a plain text."""
    response_length: int | None = None
    """Tokens of the response; None where only its text is known."""


FaultKind: TypeAlias = Literal["ungradable", "error"]


@dataclass(frozen=True)
class Fault:
    """Why a response has no grade."""

    kind: FaultKind
    """`ungradable`: the response took the grader over its limits, or the row's gold answer cannot be read. `error`: a
    failure that says nothing of the response, of a function, a server, or for want of time."""
    message: str


class Ungradable(Exception):
    """A rule cannot grade a row's responses: its gold answer, or what stands for it, cannot be read."""


@dataclass(frozen=True)
class Grade:
    """What one component of the reward gives one response."""

    value: float | None
    """None = the response is left out."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, for metrics and samples.jsonl."""
    fault: Fault | None = None
    """Why there is no value; None where there is one, or where the response is left out on purpose."""


@dataclass(frozen=True)
class RewardOutput:
    """What one response is worth."""

    score: float | None
    """None = excluded: outside the group statistics and the loss."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, for metrics and samples.jsonl."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Of the components that have no grade, by their names."""


def finite_float(value: Any) -> float | None:
    """The float that a number is, a decimal one or a scalar of NumPy or torch too; None where no finite one is."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # An array of several numbers, or an integer of 400 digits.
        return None
    return number if math.isfinite(number) else None


class RewardSource(Protocol):
    """One component of the reward. It is used by one thread at a time, the same all along."""

    name: str

    def check_row(self, sample: RewardInput) -> None:
        """Raises ValueError where the row lacks what grading it takes; its response is not looked at."""
        ...

    def grade(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Grade]:
        """One grade for each input, in order.

        Args:
            runner: Whose event loop runs what is async; the same in each call.
        """
        ...
