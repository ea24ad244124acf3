"""Rewards behind real servers and their faults: no failure becomes a number."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightrft.config import Config, DataConfig, ModelConfig, RewardConfig, dump_yaml
from lightrft.rewards.json_service import JSONService
from lightrft.rewards.records import Fault, Grade, RewardInput
from lightrft.rewards.remote import API_KEY, RemoteRewardSource, check_reward_servers, remote_sources
from tests.http_servers import Answer, Request, ok, refusing_url, serving
from tests.rewards.rows import row

ROWS = [row(number) for number in range(20)]
"""Three requests: of 8, 8 and 4."""


def source(*urls: str, **options: Any) -> RemoteRewardSource:
    options = {"backoff_seconds": 0.01, "timeout_seconds": 5.0, "tries": 3} | options
    return RemoteRewardSource(JSONService(urls, **options), 8)


def grades(source: RemoteRewardSource, rows: Sequence[RewardInput] = ROWS) -> list[Grade]:
    with asyncio.Runner() as runner:
        return source.grade(rows, runner)


def number(request: Request) -> Answer:
    """Rewards each response with the number that it is."""
    return ok({"rewards": [float(response) for response in request.body["responses"]]})


def of_first_request(answer: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
    """Another answer to the request with row 0, however often it comes."""
    return lambda request: answer(request) if 0 in request.body["rows"] else number(request)


NUMBERS = [Grade(float(n)) for n in range(20)]


def assert_lost(found: Sequence[Grade], *parts: str) -> None:
    """The rows of the first request are errors that say all parts; those of the others have their rewards."""
    assert list(found[8:]) == NUMBERS[8:]
    for grade in found[:8]:
        assert grade.value is None and grade.fault is not None and grade.fault.kind == "error"
        assert all(part in grade.fault.message for part in parts), grade.fault.message


def test_each_row_has_the_reward_of_its_own_response_in_requests_of_eight():
    with serving(number) as server:
        assert grades(source(server.url)) == NUMBERS
        assert sorted(len(request.body["responses"]) for request in server.requests) == [4, 8, 8]
        assert grades(source(server.url), []) == []


def test_a_row_that_the_server_leaves_out_has_no_value_and_no_fault():
    with serving(lambda request: ok({"rewards": [None, {"score": None}, {"score": 1, "clear": 0.5}]})) as server:
        assert grades(source(server.url), ROWS[:3]) == [Grade(None), Grade(None), Grade(1.0, {"clear": 0.5})]


# Faults of one request


FAULTS: dict[str, tuple[Answer, str]] = {
    "html": ((200, b"<html>login" + b"x" * 600), "answered with no JSON: '<html>login"),
    "cut off": ((200, b'{"rewards": [1.0, '), "answered with no JSON: "),
    "nothing": ((200, b""), "answered with no JSON: ''"),
    "half the rows": (ok({"rewards": [1.0] * 4}), "one entry for each of 8 responses: it has 4"),
    "too many rows": (ok({"rewards": [1.0] * 9}), "one entry for each of 8 responses: it has 9"),
    "nan": ((200, b'{"rewards": [1, 1, 1, NaN, 1, 1, 1, 1]}'), "must be a finite number"),
    "infinity": ((200, b'{"rewards": [1, 1, 1, 1e999, 1, 1, 1, 1]}'), "must be a finite number"),
    "a string": (ok({"rewards": ["1.0"] * 8}), "must be a finite number"),
    "another shape": (ok([1.0] * 8), "it must be an object with a list `rewards`"),
    "400": ((400, b"no such model"), "answered with 400 Bad Request: 'no such model'"),
    "404": ((404, b""), "answered with 404 Not Found"),
    "503": ((503, b"busy"), "answered with 503 Service Unavailable: 'busy'. This was try 3 of 3."),
    "429": ((429, b"slowly"), "answered with 429 Too Many Requests: 'slowly'. This was try 3 of 3."),
}
TRIED_AGAIN = ("503", "429")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_request_costs_its_rows_alone_and_names_the_url(fault):
    """RWD-06: passing failures are sent again, others are not."""
    answer, message = FAULTS[fault]
    with serving(of_first_request(lambda request: answer)) as server:
        assert_lost(grades(source(server.url)), server.url, message)
        assert len(server.requests) == (5 if fault in TRIED_AGAIN else 3)


def test_at_most_500_characters_of_a_reply_are_shown():
    with serving(lambda request: (200, b"<" + b"x" * 10_000)) as server:
        message = grades(source(server.url))[0].fault.message
    assert "<" + "x" * 499 in message and "x" * 500 not in message


@pytest.mark.parametrize("status", [503, 429])
def test_two_passing_failures_cost_nothing(status):
    """RWD-06: 503, 503, 200 is a reward."""
    lock, failures = threading.Lock(), 2

    def answer(request: Request) -> Answer:
        nonlocal failures
        with lock:
            failures -= 1
            return (status, b"busy") if failures >= 0 else number(request)

    with serving(of_first_request(answer)) as server:
        assert grades(source(server.url)) == NUMBERS


def test_a_slow_request_ends_at_its_timeout_and_the_others_before():
    """RWD-06."""
    release = threading.Event()

    def answer(request: Request) -> Answer:
        release.wait(10)
        return number(request)

    with serving(of_first_request(answer)) as server:
        started = time.monotonic()
        found = grades(source(server.url, timeout_seconds=0.5, tries=2))
        assert_lost(found, server.url, "did not answer within 0.5 seconds. This was try 2 of 2.")
        assert 1.0 <= time.monotonic() - started < 5
        release.set()


def test_a_server_that_nobody_runs_is_an_error_in_every_row():
    url = refusing_url()
    for grade in grades(source(url)):
        assert grade.value is None and grade.fault.kind == "error"
        assert f"{url} could not be reached" in grade.fault.message


def test_of_two_servers_one_may_die_without_a_loss():
    with serving(number) as alive:
        with serving(number) as dying:
            both = source(dying.url, alive.url)
            assert grades(both) == NUMBERS and dying.requests and alive.requests
        for _ in range(3):
            assert grades(both) == NUMBERS


def test_a_label_that_cannot_be_sent_is_a_users_mistake():
    with serving(number) as server, pytest.raises(ValueError, match=r"^label must have a form in JSON .*row 3"):
        grades(source(server.url), [*ROWS[:3], row(3, label=b"3")])


# From the flags


def config(**reward: Any) -> Config:
    return Config(ModelConfig("unused"), DataConfig("unused"), reward=RewardConfig(**reward))


def test_flags_make_the_sources(monkeypatch):
    assert remote_sources(config()) == []
    both = remote_sources(config(remote_rm_url="http://a:1/x, http://b:1/x/", judge_url="http://c:1", judge_model="m"))
    assert [one.name for one in both] == ["remote_rm", "judge"]


def test_the_key_is_sent_and_neither_shown_nor_dumped(monkeypatch):
    monkeypatch.setenv(API_KEY, "s3cret")

    def locked(request: Request) -> Answer:
        sent = request.headers.get("Authorization")
        return number(request) if sent == "Bearer s3cret" and request.path == "/get_reward" else (401, b"no")

    with serving(locked) as server:
        options = config(remote_rm_url=f"{server.url}/get_reward")
        (remote,) = remote_sources(options)
        with asyncio.Runner() as runner:
            assert remote.grade(ROWS, runner) == NUMBERS
            monkeypatch.setenv(API_KEY, "s3cret2")
            (remote,) = remote_sources(options)
            fault = remote.grade(ROWS, runner)[0].fault
    assert isinstance(fault, Fault) and "answered with 401" in fault.message
    assert "s3cret" not in fault.message + dump_yaml(options) + str(dataclasses.asdict(options))


def test_a_server_that_is_not_there_is_found_before_anything_loads():
    url = refusing_url()
    with serving(number) as server:
        check_reward_servers(config(remote_rm_url=server.url, judge_url=server.url, judge_model="m"))
        check_reward_servers(config())
        for flags in ({"remote_rm_url": f"{server.url},{url}"}, {"judge_url": url, "judge_model": "m"}):
            flag = next(iter(flags))
            with pytest.raises(ValueError, match=rf"^every server of {flag} must be there: {url} could not .*--{flag}"):
                check_reward_servers(config(**flags))
