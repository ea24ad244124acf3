import pytest

from lightrft.config.recipes import Part
from lightrft.rewards.aggregation import weighted_sum
from lightrft.rewards.records import Fault, Grade, RewardOutput

ANSWER, FORM = Part("answer", 0.9), Part("form", 0.5, ungradable=-1.0)
TIMED_OUT, BROKE = Fault("ungradable", "took too long"), Fault("error", "broke")


def output(*grades: Grade) -> RewardOutput:
    return weighted_sum((ANSWER, FORM), {ANSWER.key: grades[0], FORM.key: grades[1]})


def test_the_score_is_the_weighted_sum_and_every_component_is_a_metric():
    found = output(Grade(1.0, {"digits": 3.0}), Grade(0.2))
    assert found.score == pytest.approx(1.0)  # 0.9 x 1 + 0.5 x 0.2
    assert found == RewardOutput(found.score, {"answer": 1.0, "answer/digits": 3.0, "form": 0.2})


def test_weights_that_add_up_to_one_make_a_score_of_one():
    """0.7 + 0.2 + 0.1 is 0.9999999999999999, which --eval_pass_threshold 1 would not pass."""
    parts = tuple(Part(name, weight) for name, weight in (("a", 0.7), ("b", 0.2), ("c", 0.1)))
    assert weighted_sum(parts, {part.key: Grade(1.0) for part in parts}).score == 1.0


def test_an_ungradable_component_has_the_value_that_its_part_sets():
    """RWD-05"""
    found = output(Grade(1.0), Grade(None, fault=TIMED_OUT))
    assert found.score == pytest.approx(0.4)  # 0.9 x 1 + 0.5 x -1
    assert found.components == {"answer": 1.0, "form": -1.0} and found.faults == {"form": TIMED_OUT}
    # Unless it is set, that is 0: 0.9 x 0 + 0.5 x 1
    assert output(Grade(None, fault=TIMED_OUT), Grade(1.0)).score == 0.5


def test_an_error_is_no_number_whatever_the_others_are():
    """RWD-06"""
    found = output(Grade(1.0), Grade(None, fault=BROKE))
    assert found == RewardOutput(None, {"answer": 1.0}, {"form": BROKE})
    assert output(Grade(None, fault=BROKE), Grade(None, fault=TIMED_OUT)).score is None


def test_a_component_that_leaves_a_response_out_leaves_it_out_of_all():
    found = output(Grade(None, {"digits": 3.0}), Grade(0.2))
    assert found == RewardOutput(None, {"answer/digits": 3.0, "form": 0.2})


def test_the_only_function_of_a_run_is_the_reward_and_its_numbers_are_the_components():
    whole = Part("answer", is_whole=True)
    assert weighted_sum((whole,), {whole.key: Grade(0.3, {"accuracy": 1.0})}) == RewardOutput(0.3, {"accuracy": 1.0})
    assert weighted_sum((whole,), {whole.key: Grade(None, fault=TIMED_OUT)}).score == 0.0
