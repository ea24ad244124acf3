"""What counts as a response's answer."""

import time

import pytest

from lightrft.rewards.answers import answer_of, boxed


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (" 42\n", "42"),
        ("so <answer> 12 </answer> of 13", "12"),
        ("<answer>1</answer>, no: <answer>2\n</answer>", "2"),
        (r"<answer>\boxed{3}</answer> \boxed{4}", "3"),
        (r"\boxed{1} and \boxed{2}", "2"),
        ("3 + 4\n#### 7 \nDone.", "7"),
        ("<answer>open", "<answer>open"),
        ("shut</answer>", "shut</answer>"),
        (r"<think>\boxed{1}</think> \boxed{2}", "2"),
        (r"\boxed{2} <think>\boxed{1}", "2"),
        (r"<think>\boxed{1}", "1"),
        ("", ""),
    ],
)
def test_the_answer_is_the_innermost_marked_text(response, expected):
    assert answer_of(response) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{\frac{1}{2}} \boxed {x_{i}}", [r"\frac{1}{2}", "x_{i}"]),
        (r"\boxed{\frac{1}{3}", []),
        (r"} { \boxed{5}", ["5"]),
        (r"\boxed{open \boxed{2}", ["2"]),
        (r"\fbox{42}", ["42"]),
        (r"\boxed{\{1, 2\}} \boxed{\{3}", [r"\{1, 2\}", r"\{3"]),
    ],
)
def test_boxes_are_read_by_balanced_braces(text, expected):
    """RWD-01: a fraction stays whole, \\fbox{42} is 42, and an unclosed box holds nothing."""
    assert list(boxed(text)) == expected


@pytest.mark.parametrize("part", ["<answer>", "\\boxed{", "####", "\\boxed{</answer>"])
def test_an_endless_repetition_is_read_in_one_pass(part):
    started = time.perf_counter()
    answer_of(part * 50_000)
    assert time.perf_counter() - started < 1
