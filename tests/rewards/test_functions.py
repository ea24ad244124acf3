import asyncio
import sys
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import torch

from lightrft.rewards.functions import RewardFunction, resolve_reward
from lightrft.rewards.records import RESERVED_COMPONENTS, Fault, Grade, RewardInput, Ungradable


def sample(row: int, response: str = "", **extra: object) -> RewardInput:
    return RewardInput(
        prompt=f"prompt {row}",
        response=response or f"response {row}",
        label=row,
        reference=None,
        extra=extra,
        row=row,
        finish_reason="stop",
    )


def call(reward: RewardFunction, *samples: RewardInput) -> list[Grade]:
    with asyncio.Runner() as runner:
        return reward.grade(samples, runner)


def grades(function, *samples: RewardInput) -> list[Grade]:
    return call(RewardFunction("mine:f", function), *samples)


def values(function, *samples: RewardInput) -> list[float | None]:
    found = grades(function, *samples)
    assert [grade.fault for grade in found] == [None] * len(found)
    return [grade.value for grade in found]


def messages(function, *samples: RewardInput) -> list[str | None]:
    """What each error says; None where there is none."""
    faults = [grade.fault for grade in grades(function, *samples)]
    assert {fault.kind for fault in faults if fault is not None} <= {"error"}
    return [None if fault is None else fault.message for fault in faults]


def test_a_single_reward_gets_the_columns_that_its_signature_names():
    """DATA-04"""
    seen = []

    def reward(response, label, difficulty, finish_reason="?"):
        seen.append((response, label, difficulty, finish_reason))
        return label / 2

    assert values(reward, sample(3, difficulty=[1]), sample(4, difficulty=None)) == [1.5, 2.0]
    assert seen == [("response 3", 3, [1], "stop"), ("response 4", 4, None, "stop")]


def test_a_batch_reward_gets_lists_in_the_plural_and_columns_under_their_names():
    """DATA-04"""

    def reward(responses, prompts, labels, references, finish_reasons, difficulty):
        assert responses == ["response 3", "response 4"]
        assert prompts == ["prompt 3", "prompt 4"]
        assert labels == [3, 4]
        assert references == [None, None]
        assert finish_reasons == ["stop", "stop"]
        assert difficulty == ["a", "b"]
        return [0.5, None]

    assert values(reward, sample(3, difficulty="a"), sample(4, difficulty="b")) == [0.5, None]


def test_keyword_arguments_take_every_column_but_one_called_response():
    four = ("prompt", "label", "reference", "finish_reason")
    further = ("gold", "media", "response_length")

    def single(response, **columns):
        assert response == "response 3" and columns.keys() == {*four, *further, "x"}
        return 1

    def batch(responses, **columns):
        assert columns.keys() == {*(f"{name}s" for name in four), *further, "x"}
        return [1]

    row = replace(sample(3), extra={"x": 1, "response": "old", "responses": "old"})
    assert values(single, row) == [1.0]
    assert values(batch, row) == [1.0]


def test_a_column_that_some_rows_lack_leaves_the_default_or_none():
    def single(response, x=7):
        return x

    def batch(responses, x=(7, 7)):
        return [0 if value is None else value for value in x]

    assert values(single, sample(1, x=2), sample(2)) == [2.0, 7.0]
    assert values(batch, sample(1, x=2), sample(2)) == [2.0, 0.0]
    assert values(batch, sample(1), sample(2)) == [7.0, 7.0]


def test_a_parameter_that_no_column_supplies_is_an_error_with_the_known_ones():
    def single(response, answer):
        return 0

    def batch(responses, labels, answer):
        return [0, 0]

    [message] = messages(single, sample(5, x=1))
    assert (
        "mine:f needs answer, row 5 has gold, media, response_length, x, prompt, label, reference, finish_reason."
        in message
    )
    first, second = messages(batch, sample(5, answer=1), sample(6))
    assert first == second
    assert "needs answer, row 6 has gold, media, response_length, prompts, " in first


@pytest.mark.parametrize(
    ("result", "output"),
    [
        (1, Grade(1.0)),
        (True, Grade(1.0)),
        (-0.5, Grade(-0.5)),
        (np.float32(0.5), Grade(0.5)),
        (np.bool_(True), Grade(1.0)),
        (np.array(0.5), Grade(0.5)),
        (torch.tensor(0.5), Grade(0.5)),
        (Decimal("0.5"), Grade(0.5)),
        (None, Grade(None)),
        ({"score": 1, "format": False}, Grade(1.0, {"format": 0.0})),
        ({"score": None, "format": 1}, Grade(None, {"format": 1.0})),
        ({"score": 1, 7: 2}, Grade(1.0, {"7": 2.0})),
    ],
)
def test_a_result_is_a_number_none_or_a_mapping(result, output):
    assert grades(lambda response: result, sample(1)) == [output]
    assert grades(lambda responses: [result], sample(1)) == [output]


@pytest.mark.parametrize(
    "result",
    [
        float("nan"),
        float("inf"),
        np.float32("inf"),
        torch.tensor([0.5, 0.5]),
        np.array([0.5, 0.5]),
        Decimal("NaN"),
        1j,
        10**400,
        "1",
        [1],
        {"score": float("nan")},
        {"score": 1, "format": None},
        {"x": 1},
    ],
)
def test_a_result_of_another_kind_names_function_value_and_row(result):
    """RWD-05: what is wrong is the row's, and the others keep their grades."""
    good, bad = messages(lambda response: 0 if response == "response 8" else result, sample(8), sample(9))
    assert good is None and "mine:f" in bad and "row 9" in bad and repr(result) in bad
    good, bad = messages(lambda responses: [0, result], sample(8), sample(9))
    assert good is None and "mine:f" in bad and "row 9" in bad and repr(result) in bad


def test_a_result_is_quoted_in_short_and_needs_no_repr():
    class Shy:
        def __repr__(self):
            raise RuntimeError

    for result, shown in [
        (10**5000, "something of which repr raises ValueError (int)"),
        (Shy(), "something of which repr raises RuntimeError (Shy)"),
        ("y" * 10**6, "yyy... (str)"),
    ]:
        good, bad = messages(lambda responses, result=result: [0, result], sample(8), sample(9))
        assert good is None and shown in bad and "row 9" in bad and len(bad) < 1000


@pytest.mark.parametrize("name", RESERVED_COMPONENTS)
def test_a_component_named_like_a_metric_of_the_score_is_refused_with_all_such_names(name):
    """It would be averaged into `reward/mean` and its like, or overwrite `reward_before` in the summary."""
    [message] = messages(lambda response: {"score": 1, "format": 1, name: 7}, sample(9))
    assert message == (
        "A reward mapping may not use the names of the score's own metrics, "
        f"{', '.join(RESERVED_COMPONENTS)}: mine:f returned {name} in {{'score': 1, 'format': 1, '{name}': 7}} for "
        "row 9. Rename it."
    )


def test_a_batch_result_must_be_a_list_with_one_entry_for_each_response():
    for message in messages(lambda responses: [1], sample(1), sample(2)):
        assert "mine:f returned 1 for 2 responses" in message
    # A set has no order.
    for result in (None, 1.0, {"score": 1}, "11", {1.0, 0.0}):
        for message in messages(lambda responses, result=result: result, sample(1), sample(2)):
            assert f"mine:f returned {type(result).__name__}" in message
    assert values(lambda responses: np.array([1, 2]), sample(1), sample(2)) == [1.0, 2.0]


def test_what_the_function_raises_is_a_fault_of_its_row_with_the_users_own_frames():
    def reward(response, label):
        if label == 2:
            raise KeyError("theirs")
        return label

    one, two = grades(reward, sample(1), sample(2))
    assert one == Grade(1.0) and two.value is None and two.fault.kind == "error"
    assert two.fault.message.startswith("mine:f failed on row 2:\nTraceback (most recent call last):\n")
    assert two.fault.message.endswith("KeyError: 'theirs'") and two.fault.message.count("  File ") == 1


def test_what_a_batch_raises_is_a_fault_of_all_its_rows():
    for message in messages(lambda responses: 1 / 0, sample(1), sample(2)):
        assert message.startswith("mine:f failed on a batch of 2 samples from row 1 on:\n")
        assert message.endswith("ZeroDivisionError: division by zero")


def test_an_endless_recursion_is_told_in_a_few_frames():
    def reward(response):
        return reward(response)

    [message] = messages(reward, sample(4))
    assert "row 4" in message and message.endswith("RecursionError: maximum recursion depth exceeded")
    assert len(message.splitlines()) < 50


def test_pages_in_an_exception_are_left_out_of_the_middle():
    def reward(response):
        raise KeyError("x" * 10**6, "the end")

    [message] = messages(reward, sample(4))
    assert "row 4" in message and message.endswith("'the end')") and len(message) < 9000


def test_a_gold_that_cannot_be_read_makes_the_row_ungradable():
    """RWD-04"""

    def reward(response, label):
        if label == 1:
            raise Ungradable("no number in 'x'")
        return 1

    async def waits(response, label):
        return reward(response, label)

    for function in (reward, waits):
        fault = Fault("ungradable", "mine:f, row 1: no number in 'x'")
        assert grades(function, sample(1), sample(2)) == [Grade(None, fault=fault), Grade(1.0)]


def test_memory_that_ends_is_for_the_caller_to_judge():
    def reward(response):
        raise MemoryError

    async def waits(response):
        raise MemoryError

    for function in (reward, waits):
        with pytest.raises(MemoryError):
            grades(function, sample(1))


def test_no_inputs_make_no_call():
    assert grades(lambda responses: 1 / 0) == []


def test_async_singles_run_at_the_same_time_and_keep_their_order():
    """Each waits until all three have started: one after the other would never end."""
    barrier = asyncio.Barrier(3)

    async def reward(response, label):
        async with asyncio.timeout(10):
            await barrier.wait()
        await asyncio.sleep(0.01 * (3 - label))
        return None if label == 2 else label

    assert values(reward, sample(1), sample(2), sample(3)) == [1.0, None, 3.0]


def test_an_async_batch_is_awaited():
    async def reward(responses):
        await asyncio.sleep(0)
        return [2 for _ in responses]

    assert values(reward, sample(1), sample(2)) == [2.0, 2.0]


def test_what_an_async_reward_raises_is_a_fault_of_its_row():
    async def reward(response, label):
        if label == 2:
            raise KeyError("theirs")
        return label

    good, bad = messages(reward, sample(1), sample(2))
    assert good is None and bad.startswith("mine:f failed on row 2:\n") and bad.endswith("KeyError: 'theirs'")


def test_the_gold_is_the_reference_else_the_label_unless_a_column_is_called_so():
    def gold_of(row: RewardInput):
        seen = []
        values(lambda response, gold: seen.append(gold) or 0, row)
        return seen[0]

    assert gold_of(sample(3)) == 3
    assert gold_of(replace(sample(3), reference="four")) == "four"
    assert gold_of(replace(sample(3, gold="five"), reference="four")) == "five"


def test_media_is_handed_over_beside_the_response():
    def reward(response, media):
        return len(media["images"])

    assert values(reward, replace(sample(1), media={"images": ["a", "b"]})) == [2.0]


def test_options_are_keyword_arguments_the_same_for_every_sample():
    def reward(response, label, factor=1, shift=0):
        return label * factor + shift

    options = RewardFunction("mine:f", reward, {"factor": 10})
    assert [grade.value for grade in call(options, sample(1), sample(2))] == [10.0, 20.0]
    for name in ("size", "label", "media"):
        with pytest.raises(ValueError, match=rf"mine:f has no {name}\. Its options are factor, shift\."):
            RewardFunction("mine:f", reward, {name: 1})


def test_the_first_parameter_must_say_which_form_it_is():
    for function, first in ((lambda text: 0, "text"), (lambda: 0, "none")):
        with pytest.raises(ValueError, match=f"must be response or responses: mine:f has {first}"):
            RewardFunction("mine:f", function)


def test_a_parameter_without_a_name_for_calls_is_refused():
    def reward(response, prompt, /):
        return 1

    with pytest.raises(ValueError, match="must have names that a call can use: mine:f has prompt before `/`"):
        RewardFunction("mine:f", reward)


def test_a_built_in_reward_is_resolved_by_name_and_an_unknown_one_lists_them():
    assert call(resolve_reward("exact_match"), sample(3, response="3")) == [Grade(1.0, {"accuracy": 1.0})]
    with pytest.raises(ValueError, match=r"Unknown reward: accurate\. Built in are exact_match, contains_answer, last"):
        resolve_reward("accurate")


def test_a_function_is_resolved_by_module_and_by_file(tmp_path, monkeypatch):
    source = "VALUE = 2\ndef double(response, label):\n    return label * VALUE\n"
    (tmp_path / "my_rewards_on_path.py").write_text(source)
    # A file may be called like a module that is imported already.
    (tmp_path / "math.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for spec in ("my_rewards_on_path:double", f"{tmp_path}/math.py:double"):
        assert call(resolve_reward(spec), sample(3)) == [Grade(6.0)]
    assert "double" not in vars(sys.modules["math"])


def test_a_spec_that_leads_nowhere_says_which_part_is_missing(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("VALUE = 2\ndef double(response, label):\n    return label * VALUE\n")
    for spec, message in (
        ("no_such_module:f", "no module no_such_module"),
        ("no_such.module:f", "no module no_such"),
        ("json.no_such:f", "no module json.no_such"),
        (f"{tmp_path}/gone.py:f", "gone.py is no file"),
        (f"{path}:triple", "has no triple. Its functions: double."),
        (f"{path}:VALUE", "is int"),
    ):
        with pytest.raises(ValueError) as caught:
            resolve_reward(spec)
        assert message in str(caught.value)


def test_a_module_that_fails_to_import_another_shows_its_own_error(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import no_such_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        resolve_reward(f"{path}:f")
