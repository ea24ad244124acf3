"""The protocol of remote rewards, both halves."""

import datetime
import json
import math
from typing import Any

import pytest

from lightrft.rewards.records import Fault, Grade
from lightrft.rewards.remote_protocol import body_of, inputs_of, read_grades, reply_of
from tests.rewards.rows import row

ROWS = [
    row(3, reference="r", extra={"level": 2, "tags": ["a"]}, messages=[{"role": "user", "content": "3+0="}]),
    row(5, finish_reason="length", extra={"level": None}, response_length=1),
]


def test_a_request_has_openrlhfs_three_lists_and_ours():
    assert body_of(ROWS) == {
        "query": ["3+0=3", "5+0=5"],
        "prompts": ["3+0=", "5+0="],
        "messages": [[{"role": "user", "content": "3+0="}], None],
        "responses": ["3", "5"],
        "labels": ["3", "5"],
        "references": ["r", None],
        "finish_reasons": ["stop", "length"],
        "response_lengths": [None, 1],
        "rows": [3, 5],
        "extra": {"level": [2, None], "tags": [["a"], None]},
    }


def test_a_server_reads_what_a_client_wrote():
    """A column that a row lacks is null there."""
    first, second = inputs_of(json.loads(json.dumps(body_of(ROWS))))
    assert first == ROWS[0]
    assert second == row(5, finish_reason="length", extra={"level": None, "tags": None}, response_length=1)


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 1), b"x", float("nan"), "\ud800", {1, 2}])
def test_a_further_column_without_a_form_in_json_is_not_sent_and_a_label_without_one_is_a_users_mistake(value):
    assert body_of([row(0, extra={"odd": value, "plain": 1}), row(1)])["extra"] == {"plain": [1, None]}
    for name in ("label", "reference"):
        with pytest.raises(ValueError, match=rf"^{name} must have a form in JSON .*: row 7 has "):
            body_of([row(1), row(7, **{name: value})])


def test_a_request_of_openrlhf_is_read():
    """Its clients send the prompt and the response in one text."""
    body = {"query": ["1+1=2", "1+2=4"], "prompts": ["1+1=", "1+2="], "labels": ["2", "3"]}
    assert inputs_of(body) == [
        row(0, prompt="1+1=", response="2", label="2"),
        row(1, prompt="1+2=", response="4", label="3"),
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "the body must be a JSON object: it is list"),
        ({}, "the body must have prompts, and responses or query: prompts is not in it, but nothing"),
        ({"prompts": ["a"]}, "the body must have prompts, and responses or query: query is not in it, but prompts"),
        ({"prompts": "a", "responses": ["a"]}, "prompts must be a list of texts: a."),
        ({"prompts": ["a"], "responses": [1]}, r"responses must be a list of texts: \[1\]"),
        ({"prompts": ["a"], "responses": ["a", "b"]}, "prompts must have one entry a response: 1 for 2 responses"),
        ({"prompts": ["a"], "responses": ["a"], "labels": []}, "labels must have one entry a response: 0 for 1"),
        ({"prompts": ["a"], "responses": ["a"], "labels": "1"}, "labels must be a list: it is str"),
        ({"prompts": ["a"], "responses": ["a"], "extra": {"x": []}}, "x must have one entry a response: 0 for 1"),
        ({"prompts": ["a"], "responses": ["a"], "extra": [1]}, "extra must be an object of lists"),
        ({"prompts": ["a"], "responses": ["a"], "messages": ["hi"]}, "messages must have a list of messages, or null"),
        ({"prompts": ["a"], "query": ["b"]}, "query must begin with its prompt .*: entry 0 does not"),
        ({"prompts": ["a"], "query": []}, "query and prompts must be equally long: 0 and 1"),
    ],
)
def test_another_request_is_refused_by_what_is_wrong_with_it(body, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        inputs_of(body)


GRADES = [
    Grade(0.5),
    Grade(None),
    Grade(1.0, {"length": 3.0}),
    Grade(None, {"length": 4.0}),
    Grade(None, fault=Fault("ungradable", "the gold answer cannot be read")),
]


def test_a_client_reads_what_a_server_replied():
    reply = json.loads(json.dumps(reply_of(GRADES)))
    assert reply["rewards"][:3] == [0.5, None, {"score": 1.0, "length": 3.0}]
    assert read_grades(reply, 5) == GRADES


def test_a_reply_of_openrlhf_is_read():
    """`scores` and `extra_logs` repeat the rewards there."""
    reply = {"rewards": [1, 0.25, True], "scores": [9, 9, 9], "extra_logs": {"dummy_scores": [1, 0, 0]}}
    assert read_grades(reply, 3) == [Grade(1.0), Grade(0.25), Grade(1.0)]


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**400, "1.0", [], [1.0], {}, {"scores": 1}, {"score": "1"}]
)
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"score": 1.0, "detail": value}])
def test_one_entry_that_is_no_reward_spoils_the_reply(value, wrap):
    with pytest.raises(ValueError, match=r"^a reward (must be a finite number|that is an object must have a `score`)"):
        read_grades({"rewards": [0.5, wrap(value)]}, 2)


@pytest.mark.parametrize(
    "answer", [None, [], [1.0], 1.0, "1", {}, {"reward": [1.0]}, {"rewards": 1.0}, {"rewards": "1"}]
)
def test_a_reply_of_another_shape_is_refused(answer: Any):
    with pytest.raises(ValueError, match=r"^it must be an object with a list `rewards`"):
        read_grades(answer, 1)


def test_a_number_may_not_be_called_as_a_metric_of_the_score():
    with pytest.raises(ValueError, match=r"^a reward may not name its numbers as metrics of the score: mean, std\."):
        read_grades({"rewards": [{"score": 1.0, "std": 1.0, "mean": 0.0}]}, 1)


@pytest.mark.parametrize("count", [1, 3])
def test_a_wrong_count_is_refused_with_both_numbers(count):
    with pytest.raises(ValueError, match=rf"^rewards must have one entry for each of {count} responses: it has 2\."):
        read_grades({"rewards": [1.0, 2.0]}, count)
