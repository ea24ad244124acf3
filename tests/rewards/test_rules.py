import inspect
import random
import time

import pytest

from lightrft.rewards.countdown import countdown
from lightrft.rewards.format import format_tags, think_and_box
from lightrft.rewards.length import overlong_penalty, within_length
from lightrft.rewards.records import Ungradable
from lightrft.rewards.rules import RULES
from lightrft.rewards.text import edit_distance, exact, fuzzy
from tests.data_files import read_rows


def test_every_rule_takes_one_response_and_says_what_it_gives():
    for name, rule in RULES.items():
        assert next(iter(inspect.signature(rule).parameters)) == "response", name
        assert rule.__doc__, name


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>1 + 1</think><answer>2</answer>", 1.0),
        (" <think>1 + 1</think>\n\n<answer>2</answer>\n", 1.0),
        ("<think>1 < 2</think><answer>2\n3</answer>", 1.0),
        ("<answer>2</answer><think>1 + 1</think>", 0.0),
        ("<think>1 + 1</think>", 0.0),
        ("<think>1 + 1</think><answer>2", 0.0),
        ("<think>1 + 1</think><answer> </answer>", 0.0),
        ("<think></think><answer>2</answer>", 0.0),
        ("<think>1 + 1</think> so <answer>2</answer>", 0.0),
        ("Well, <think>1 + 1</think><answer>2</answer>", 0.0),
        ("<think>1 + 1</think><answer>2</answer> Bye", 0.0),
        ("<think>a</think><think>b</think><answer>2</answer>", 0.0),
        ("<think>a</think><answer>1</answer><answer>2</answer>", 0.0),
        ("<think>a <answer>1</answer></think><answer>2</answer>", 0.0),
        ("<think>a<answer>2</think></answer>", 0.0),
        ("1 + 1</think><answer>2</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_each_tag_stands_once_and_in_order(response, value):
    assert format_tags(response) == value


def test_a_tag_that_the_prompt_has_opened_is_counted_with_the_response():
    prompt = "user: 1 + 1?\nassistant: <think>\n"
    assert format_tags("1 + 1</think><answer>2</answer>", prompt) == 1.0
    assert format_tags("<think>1 + 1</think><answer>2</answer>", prompt) == 0.0
    assert think_and_box(r"1 + 1</think> \boxed{2}", prompt) == 1.0


def test_tags_have_the_names_that_are_asked_for():
    tags = ["plan", "work", "result"]
    assert format_tags("<plan>a</plan><work>b</work><result>c</result>", tags=tags) == 1.0
    assert format_tags("<work>b</work><plan>a</plan><result>c</result>", tags=tags) == 0.0


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"<think>1 + 1</think> So \boxed{2}.", 1.0),
        (r"<think>1 + 1</think> So \boxed{2.", 0.0),
        (r"<think>\boxed{2}</think> So 2.", 0.0),
        (r"So \boxed{2}.", 0.0),
        (r"<think></think>\boxed{2}", 0.0),
        (r"<think>a</think><think>b</think>\boxed{2}", 0.0),
    ],
)
def test_a_box_follows_the_thoughts(response, value):
    assert think_and_box(response) == value


def test_overlong_responses_lose_up_to_1():
    """DAPO, eq. 13, with L_max 20 and L_cache 10: (20 - 10 - 15) / 10 = -0.5."""
    values = [overlong_penalty("", response_length=length, max_length=20, buffer=10) for length in (0, 10, 15, 20, 25)]
    assert values == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_a_buffer_of_nothing_is_refused():
    with pytest.raises(ValueError, match="buffer must be positive: 0"):
        overlong_penalty("", response_length=1, max_length=20, buffer=0)


def test_a_length_lies_within_its_limits():
    values = [within_length("", response_length=length, min_length=2, max_length=4) for length in (1, 2, 4, 5)]
    assert values == [0.0, 1.0, 1.0, 0.0]


def test_exact_text_is_the_gold_but_for_white_space():
    assert exact("<answer>the  cat\nsat</answer>", "the cat sat") == 1.0
    assert exact("The cat sat", "the cat sat") == 0.0
    assert exact("The cat sat", "the cat sat", ignore_case=True) == 1.0
    assert exact("the cat sat there", "the cat sat") == 0.0


def test_fuzzy_text_is_one_less_the_share_of_edits():
    # kitten -> sitting: k to s, e to i, and a g: 3 edits of 7 characters.
    assert fuzzy("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert fuzzy("kitten", "sitting", threshold=0.6) == 0.0
    assert fuzzy("Kitten", "kitten") == pytest.approx(1 - 1 / 6)
    assert fuzzy("Kitten", "kitten", ignore_case=True) == 1.0
    assert fuzzy("", "abc") == 0.0


@pytest.mark.parametrize("rule", [exact, fuzzy])
@pytest.mark.parametrize("gold", [None, "", " \n"])
def test_a_text_without_a_gold_cannot_be_graded(rule, gold):
    with pytest.raises(Ungradable):
        rule("anything", gold)


def table_distance(text: str, other: str) -> int:
    """The distance by its definition, row by row."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(text):
        above, row = row, [i + 1]
        for j, right in enumerate(other):
            row.append(min(above[j] + (left != right), above[j + 1] + 1, row[j] + 1))
    return row[-1]


def test_edit_distances_are_those_of_the_definition():
    rng = random.Random(7)
    for _ in range(500):
        text, other = ("".join(rng.choices("abc", k=rng.randint(0, 9))) for _ in range(2))
        assert edit_distance(text, other) == table_distance(text, other), (text, other)


def test_pages_of_text_are_compared_at_once():
    started = time.process_time()
    assert edit_distance("ab" * 5000, "ba" * 5000) == 2
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("(28 + 28) + 2", 1.0),
        ("28 + 28 + 2 = 58", 1.0),
        (r"\boxed{28 + 28 + 2}", 1.0),
        ("28 * 2 + 2", 0.0),
        ("28 + 28 + 2 + 0", 0.0),
        ("58", 0.0),
        ("28 + 28", 0.0),
        ("28 + 28 - 2", 0.0),
        ("28 + 28 + 2 + (2 - 2)", 0.0),
        ("28 // 28 + 2", 0.0),
        ("__import__('os')", 0.0),
        ("28 ** 28 ** 2", 0.0),
        ("(" * 3000 + "28", 0.0),
        ("", 0.0),
    ],
)
def test_countdown_uses_each_number_once(answer, value):
    assert countdown(f"<answer>{answer}</answer>", gold=58, numbers=[28, 28, 2]) == value


def test_countdown_divides_exactly():
    # 8 / (3 - 8 / 3) = 8 / (1/3) = 24, which floats miss.
    assert countdown(r"<answer>8 / (3 - 8 / 3)</answer>", gold=24, numbers="8, 3, 8, 3") == 1.0
    assert countdown(r"\boxed{8 \div (3 - \frac{8}{3})}", gold="24", numbers=[3, 3, 8, 8]) == 1.0
    assert countdown("<answer>1 / (2 - 2)</answer>", gold=1, numbers=[1, 2, 2]) == 0.0


def test_countdown_needs_its_numbers():
    for gold, numbers in ((None, [1]), ("x", [1]), (3, []), (3, "one"), (1.5, [1]), (3, [1.5, 2])):
        with pytest.raises(Ungradable):
            countdown("<answer>1</answer>", gold, numbers)


def test_a_table_may_have_countdowns_numbers_as_floats():
    assert countdown("<answer>1 + 2</answer>", gold=3.0, numbers=[1.0, 2.0]) == 1.0


def test_countdowns_solutions_are_right():
    rows = read_rows("countdown/test.jsonl")
    assert len(rows) == 200
    for row, other in zip(rows, rows[1:] + rows[:1], strict=True):
        response = f"<think>hm</think><answer>{row['solution']}</answer>"
        assert countdown(response, row["target"], row["numbers"]) == 1.0, row
        assert countdown(response, row["target"] + 1, row["numbers"]) == 0.0, row
        if sorted(other["numbers"]) != sorted(row["numbers"]):
            assert countdown(response, row["target"], other["numbers"]) == 0.0, row
