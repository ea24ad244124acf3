import pytest

from lightrft.rewards.builtin import contains_answer, exact_match, last_number

RIGHT = {"score": 1.0, "accuracy": 1.0}
WRONG = {"score": 0.0, "accuracy": 0.0}


def test_exact_match_wants_a_finished_response_that_is_the_label_up_to_white_space():
    assert exact_match(" 12\n", label="12", finish_reason="stop") == RIGHT
    assert exact_match("12", label=12, finish_reason="stop") == RIGHT
    assert exact_match("12.", label="12", finish_reason="stop") == WRONG
    assert exact_match("12", label="12", finish_reason="length") == WRONG


def test_contains_answer_wants_the_label_somewhere():
    assert contains_answer("so it is 12, I think", label=12) == RIGHT
    assert contains_answer("so it is 13", label=12) == WRONG


def test_an_empty_label_is_contained_in_nothing():
    assert contains_answer("anything", label=" ") == WRONG


@pytest.mark.parametrize(
    "response", ["1,234", "$1,234.00", "so 5 apples make 1234.", "= 1234", "1.234e3", "(1234)", "5-1234", "**1,234**"]
)
def test_last_number_reads_the_usual_spellings_of_1234(response):
    """RWD-02"""
    assert last_number(response, label="1234") == RIGHT
    assert last_number(response, label="#### 1,234") == RIGHT
    assert last_number(response, label=1234.0) == RIGHT


@pytest.mark.parametrize(
    "response",
    ["234", "-1234", "−1234", "-$1,234", "$-1,234", "x = -1234", "1234 or 5", "1,2345", "1234.5", "", "none"],
)
def test_last_number_pays_nothing_for_another_number_or_none(response):
    """RWD-02"""
    assert last_number(response, label="1234") == WRONG


def test_last_number_compares_without_rounding():
    assert last_number("0.1", label=".10") == RIGHT
    assert last_number("0.30000000000000004", label="0.3") == WRONG
    assert last_number("9007199254740993", label="9007199254740992") == WRONG


def test_a_label_without_a_number_excludes_the_sample():
    assert last_number("no number either", label="unknown") is None
