import asyncio
import sys
from dataclasses import replace

import numpy as np
import pytest

from lightrft.rewards.functions import RewardFunction, resolve_reward
from lightrft.rewards.records import RESERVED_COMPONENTS, RewardInput, RewardOutput


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


def call(reward: RewardFunction, *samples: RewardInput) -> list[RewardOutput]:
    with asyncio.Runner() as runner:
        return reward(samples, runner)


def outputs(function, *samples: RewardInput) -> list[RewardOutput]:
    return call(RewardFunction("mine:f", function), *samples)


def scores(function, *samples: RewardInput) -> list[float | None]:
    return [output.score for output in outputs(function, *samples)]


def test_a_single_reward_gets_the_columns_that_its_signature_names():
    """DATA-04"""
    seen = []

    def reward(response, label, difficulty, finish_reason="?"):
        seen.append((response, label, difficulty, finish_reason))
        return label / 2

    assert scores(reward, sample(3, difficulty=[1]), sample(4, difficulty=None)) == [1.5, 2.0]
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

    assert scores(reward, sample(3, difficulty="a"), sample(4, difficulty="b")) == [0.5, None]


def test_keyword_arguments_take_every_column_but_one_called_response():
    def single(response, **columns):
        assert response == "response 3" and columns.keys() == {"prompt", "label", "reference", "finish_reason", "x"}
        return 1

    def batch(responses, **columns):
        assert columns.keys() == {"prompts", "labels", "references", "finish_reasons", "x"}
        return [1]

    row = replace(sample(3), extra={"x": 1, "response": "old", "responses": "old"})
    assert scores(single, row) == [1.0]
    assert scores(batch, row) == [1.0]


def test_a_column_that_some_rows_lack_leaves_the_default_or_none():
    def single(response, x=7):
        return x

    def batch(responses, x=(7, 7)):
        return [0 if value is None else value for value in x]

    assert scores(single, sample(1, x=2), sample(2)) == [2.0, 7.0]
    assert scores(batch, sample(1, x=2), sample(2)) == [2.0, 0.0]
    assert scores(batch, sample(1), sample(2)) == [7.0, 7.0]


def test_a_parameter_that_no_column_supplies_is_an_error_with_the_known_ones():
    def single(response, answer):
        return 0

    def batch(responses, labels, answer):
        return [0, 0]

    with pytest.raises(
        ValueError, match=r"mine:f needs answer, row 5 has x, prompt, label, reference, finish_reason\."
    ):
        outputs(single, sample(5, x=1))
    with pytest.raises(ValueError, match=r"needs answer, row 6 has prompts, labels, references, finish_reasons\."):
        outputs(batch, sample(5, answer=1), sample(6))


@pytest.mark.parametrize(
    ("result", "output"),
    [
        (1, RewardOutput(1.0)),
        (True, RewardOutput(1.0)),
        (-0.5, RewardOutput(-0.5)),
        (np.float32(0.5), RewardOutput(0.5)),
        (None, RewardOutput(None)),
        ({"score": 1, "format": False}, RewardOutput(1.0, {"format": 0.0})),
        ({"score": None, "format": 1}, RewardOutput(None, {"format": 1.0})),
    ],
)
def test_a_result_is_a_number_none_or_a_mapping(result, output):
    assert outputs(lambda response: result, sample(1)) == [output]
    assert outputs(lambda responses: [result], sample(1)) == [output]


@pytest.mark.parametrize(
    "result", [float("nan"), float("inf"), "1", [1], {"score": float("nan")}, {"score": 1, "format": None}, {"x": 1}]
)
def test_a_result_of_another_kind_names_function_value_and_row(result):
    with pytest.raises(ValueError) as caught:
        outputs(lambda response: 0 if response == "response 8" else result, sample(8), sample(9))
    assert "mine:f" in str(caught.value) and "row 9" in str(caught.value) and repr(result) in str(caught.value)


@pytest.mark.parametrize("name", RESERVED_COMPONENTS)
def test_a_component_named_like_a_metric_of_the_score_is_refused_with_all_such_names(name):
    """It would be averaged into `reward/mean` and its like, or overwrite `reward_before` in the summary."""
    with pytest.raises(ValueError) as caught:
        outputs(lambda response: {"score": 1, "format": 1, name: 7}, sample(9))
    assert str(caught.value) == (
        "A reward mapping may not use the names of the score's own metrics, mean, mean_square, std, excluded, reward, "
        f"response_length, truncated: mine:f returned {name} in {{'score': 1, 'format': 1, '{name}': 7}} for row 9. "
        "Rename it."
    )


def test_a_batch_result_must_be_a_list_with_one_entry_for_each_response():
    with pytest.raises(ValueError, match=r"mine:f returned 1 for 2 responses"):
        outputs(lambda responses: [1], sample(1), sample(2))
    for result in (None, 1.0, {"score": 1}, "11"):
        with pytest.raises(ValueError, match=f"mine:f returned {type(result).__name__}"):
            outputs(lambda responses, result=result: result, sample(1), sample(2))
    assert scores(lambda responses: np.array([1, 2]), sample(1), sample(2)) == [1.0, 2.0]


def test_what_the_function_raises_propagates():
    def reward(response):
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        outputs(reward, sample(1))


def test_no_inputs_make_no_call():
    assert outputs(lambda responses: 1 / 0) == []


def test_async_singles_run_at_the_same_time_and_keep_their_order():
    """Each waits until all three have started: one after the other would never end."""
    barrier = asyncio.Barrier(3)

    async def reward(response, label):
        async with asyncio.timeout(10):
            await barrier.wait()
        await asyncio.sleep(0.01 * (3 - label))
        return None if label == 2 else label

    assert scores(reward, sample(1), sample(2), sample(3)) == [1.0, None, 3.0]


def test_an_async_batch_is_awaited():
    async def reward(responses):
        await asyncio.sleep(0)
        return [2 for _ in responses]

    assert scores(reward, sample(1), sample(2)) == [2.0, 2.0]


def test_what_an_async_reward_raises_propagates():
    async def reward(response):
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        outputs(reward, sample(1), sample(2))


def test_the_first_parameter_must_say_which_form_it_is():
    for function, first in ((lambda text: 0, "text"), (lambda: 0, "none")):
        with pytest.raises(ValueError, match=f"must be response or responses: mine:f has {first}"):
            RewardFunction("mine:f", function)


def test_a_built_in_reward_is_resolved_by_name_and_an_unknown_one_lists_them():
    assert call(resolve_reward("exact_match"), sample(3, response="3")) == [RewardOutput(1.0, {"accuracy": 1.0})]
    with pytest.raises(ValueError, match=r"Unknown reward: exact\. Built in are exact_match, contains_answer, last_n"):
        resolve_reward("exact")


def test_a_function_is_resolved_by_module_and_by_file(tmp_path, monkeypatch):
    source = "VALUE = 2\ndef double(response, label):\n    return label * VALUE\n"
    (tmp_path / "my_rewards_on_path.py").write_text(source)
    # A file may be called like a module that is imported already.
    (tmp_path / "math.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for spec in ("my_rewards_on_path:double", f"{tmp_path}/math.py:double"):
        assert call(resolve_reward(spec), sample(3)) == [RewardOutput(6.0)]
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
