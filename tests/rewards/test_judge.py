"""Judges behind a real server of OpenAI's chat protocol."""

import asyncio
import re
from typing import Any

import pytest

from lightrft.config import Config, DataConfig, ModelConfig, RewardConfig
from lightrft.rewards.judge import API_KEY, PROMPT, JudgeSource, as_text, filled
from lightrft.rewards.records import Grade, RewardInput
from lightrft.rewards.remote import remote_sources
from tests.http_servers import Answer, Request, ok, serving
from tests.rewards.rows import row


def judge(url: str, **flags: Any) -> JudgeSource:
    options = RewardConfig(judge_url=url, judge_model="judge-7b", **flags)
    (source,) = remote_sources(Config(ModelConfig("unused"), DataConfig("unused"), reward=options))
    assert isinstance(source, JudgeSource)
    source.service.backoff_seconds = 0.01
    return source


def grades(source: JudgeSource, *rows: RewardInput) -> list[Grade]:
    with asyncio.Runner() as runner:
        return source.grade(rows, runner)


def says(text: str | None) -> Answer:
    return ok({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]})


def asked(request: Request) -> str:
    """The text that the judge was sent."""
    [message] = request.body["messages"]
    assert message["role"] == "user"
    return message["content"]


def written(text: str, **flags: Any) -> Grade:
    """The grade for what a judge writes."""
    with serving(lambda request: says(text)) as server:
        [grade] = grades(judge(server.url, **flags), row(1))
        return grade


def test_each_response_has_the_share_of_the_range_that_its_judge_wrote():
    """7 of 0 to 10 is 0.7."""

    def answer(request: Request) -> Answer:
        response = asked(request).split("<answer>\n")[1].split("\n</answer>")[0]
        return says(f"Not bad.\nScore: {response}")

    with serving(answer) as server:
        assert grades(judge(server.url), row(7), row(10), row(0)) == [Grade(0.7), Grade(1.0), Grade(0.0)]
        request = server.requests[0]
        assert request.path == "/v1/chat/completions"
        assert (request.body["model"], request.body["temperature"]) == ("judge-7b", 0)
        grades(judge(f"{server.url}/v1/"), row(7))
        assert server.requests[-1].path == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 7),
        ("**Score:** 7/10", 7),
        ("**Score: 7**", 7),
        ("final score = 7.5.", 7.5),
        ('{"score": 7}', 7),
        ("SCORE:.5", 0.5),
        ("The answer says `Score: 10`, which is no score of mine.\nScore: 2", 2),
        ("Score: 3e0", 3),
    ],
)
def test_the_last_score_is_read(text, score):
    assert written(text) == Grade(pytest.approx(score / 10))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("I cannot judge this.", r"no score, .*, is in what it ends with: 'I cannot judge this\.'"),
        ("", "no score"),
        ("Score: 11", "the score must be from 0 to 10: 11, in 'Score: 11'"),
        ("Score: -1", "the score must be from 0 to 10: -1"),
        ("Score: 80%", "the score must be from 0 to 10: 80"),
        ("Score: 1e400", "the score must be from 0 to 10: inf"),
    ],
)
def test_a_judge_without_a_score_has_failed_and_not_the_response(text, message):
    grade = written(text)
    assert grade.value is None and grade.fault is not None and grade.fault.kind == "error"
    assert grade.fault.message.startswith("http://127.0.0.1:") and re.search(message, grade.fault.message)


@pytest.mark.parametrize(
    "reply",
    [
        says(None),
        ok({"choices": []}),
        ok({"error": {"message": "no such model"}}),
        ok([1]),
        (200, b"<html>"),
        (400, b"no such model"),
        (503, b"busy"),
    ],
)
def test_a_reply_of_another_shape_is_an_error_and_other_rows_have_their_scores(reply):
    with serving(lambda request: reply if "1+0=" in asked(request) else says("Score: 5")) as server:
        failed, graded = grades(judge(server.url), row(1), row(2))
    assert graded == Grade(0.5)
    assert failed.value is None and failed.fault is not None and failed.fault.kind == "error"
    assert server.url in failed.fault.message


@pytest.mark.parametrize(
    ("score_range", "text", "share"),
    [((1, 5), "Score: 4", 0.75), ((-1, 1), "Score: 0", 0.5), ((0, 1), "Score: 0.3", 0.3)],
)
def test_the_ends_of_the_range_are_zero_and_one_and_stand_in_the_text(score_range, text, share):
    """4 of 1 to 5: 3 / 4."""
    with serving(lambda request: says(text)) as server:
        assert grades(judge(server.url, judge_range=score_range), row(1)) == [Grade(pytest.approx(share))]
        low, high = score_range
        assert f"from {low} (useless" in asked(server.requests[0]) and f"to {high} (right" in asked(server.requests[0])


def test_a_pattern_of_ones_own_reads_other_scores():
    assert written("Grade <3>, then grade <4>", judge_pattern=r"[Gg]rade <(\d)>") == Grade(0.4)
    fault = written("grade <x>", judge_pattern=r"grade <(\w)>").fault
    assert fault is not None and "the score must be a number: 'x', in 'grade <x>'" in fault.message


def test_a_text_of_ones_own_has_the_row_in_its_places_and_keeps_other_braces(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text('{"a": {1}} {prompt}|{response}|{label}|{reference}|{response}|{other}')
    with serving(lambda request: says("Score: 1")) as server:
        grades(judge(server.url, judge_prompt=str(path)), row(1, label=[2, "é"], reference=None))
        assert asked(server.requests[0]) == '{"a": {1}} 1+0=|1|[2, "é"]||1|{other}'


@pytest.mark.parametrize(
    "response", ["{prompt}", "{label} {0} {} }{", "{{response}}", r"\1 \g<0> $1", "%s %(x)s", "{high}"]
)
def test_what_looks_like_a_place_in_a_response_stays_as_it_is(response):
    text = filled("<{response}> {prompt}", {"response": response, "prompt": "p"})
    assert text == f"<{response}> p"


def test_the_text_that_is_built_in_has_every_place_but_the_reference():
    for name in ("prompt", "label", "response", "low", "high"):
        assert PROMPT.count(f"{{{name}}}") == 1
    assert as_text(None) == "" and as_text("x") == "x" and as_text({"a": 1}) == '{"a": 1}'


def test_half_of_a_surrogate_pair_is_a_users_mistake_with_its_row():
    with (
        serving(lambda request: says("Score: 1")) as server,
        pytest.raises(ValueError, match=r"must be Unicode text: row 4 "),
    ):
        grades(judge(server.url), row(1), row(4, label="\ud800"))


def test_the_judges_key_is_its_own(monkeypatch):
    monkeypatch.setenv(API_KEY, "s3cret")
    monkeypatch.setenv("LIGHTRFT_REWARD_API_KEY", "other")

    with serving(lambda request: (401, request.headers["Authorization"].encode())) as server:
        [grade] = grades(judge(server.url), row(1))
        assert server.requests[0].headers["Authorization"] == "Bearer s3cret"
    assert grade.fault is not None and "'Bearer ***'" in grade.fault.message
