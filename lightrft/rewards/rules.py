"""Rules: functions of one response that a recipe can name."""

from collections.abc import Callable

from lightrft.rewards.code import run_code
from lightrft.rewards.countdown import countdown
from lightrft.rewards.format import format_tags, think_and_box
from lightrft.rewards.length import overlong_penalty, within_length
from lightrft.rewards.math import grade, grade_choice, grade_marked
from lightrft.rewards.text import exact, fuzzy

RULES: dict[str, Callable[..., float]] = {
    "answer": grade,
    "geo3k": grade_marked,
    "choice": grade_choice,
    "exact": exact,
    "fuzzy": fuzzy,
    "countdown": countdown,
    "code": run_code,
    "format": format_tags,
    "think_box": think_and_box,
    "length": within_length,
    "overlong": overlong_penalty,
}
"""By name. Each takes `response`, those of the row's columns that it names (`gold` is the reference, or without one the
label) and its options. What raises `Ungradable` has no grade."""
