"""JSONService against real servers and their faults."""

import asyncio
import threading
import time
from typing import Any

import pytest
from tenacity import RetryCallState, Retrying

from lightrft.rewards.json_service import JSONService, ServiceError, api_key_of
from tests.http_servers import Answer, Request, ok, refusing_url, serving


def ask(service: JSONService, count: int = 1) -> list[Any]:
    return asyncio.run(service.post_all([{"number": i} for i in range(count)], lambda index, answer: (index, answer)))


def service(*urls: str, **options: Any) -> JSONService:
    return JSONService(urls, **{"backoff_seconds": 0.01, "timeout_seconds": 5.0} | options)


def double(request: Request) -> Answer:
    return ok(2 * request.body["number"])


def test_answers_come_in_the_order_of_the_requests():
    def later_first(request: Request) -> Answer:
        time.sleep(0.05 * (3 - request.body["number"]))
        return double(request)

    with serving(later_first) as server:
        assert ask(service(server.url), 4) == [(0, 0), (1, 2), (2, 4), (3, 6)]


def test_no_more_requests_than_allowed_are_under_way_and_connections_are_used_again():
    lock, under_way, most = threading.Lock(), 0, 0

    def counted(request: Request) -> Answer:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.01)
        with lock:
            under_way -= 1
        return double(request)

    with serving(counted) as server:
        ask(service(server.url, max_requests=3), 30)
        assert most == 3 and len({request.connection for request in server.requests}) == 3


def test_servers_take_turns():
    with serving(double) as one, serving(double) as two:
        assert ask(service(one.url, two.url), 10) == [(i, 2 * i) for i in range(10)]
        assert len(one.requests) == len(two.requests) == 5


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_asked_again(status):
    """RWD-06: 503, 503, 200 is an answer."""
    statuses = iter([status, status, 200])

    def answer(request: Request) -> Answer:
        status = next(statuses)
        return double(request) if status == 200 else (status, b"busy")

    with serving(answer) as server:
        assert ask(service(server.url)) == [(0, 0)] and len(server.requests) == 3


def test_the_next_server_takes_the_request_of_one_that_is_gone():
    with serving(double) as server:
        assert ask(service(refusing_url(), server.url), 4) == [(0, 0), (1, 2), (2, 4), (3, 6)]


def test_every_request_of_a_server_that_is_gone_is_the_next_ones_at_once():
    """Whoever else asks in between: each request goes round the servers on its own, and waits after its second try."""
    with serving(double) as server:
        started = time.monotonic()
        answers = ask(service(refusing_url(), server.url, tries=2, backoff_seconds=30.0), 30)
        assert answers == [(i, 2 * i) for i in range(30)] and time.monotonic() - started < 25


def test_each_request_has_its_own_answer_or_its_own_error():
    def answer(request: Request) -> Answer:
        return double(request) if request.body["number"] % 2 else (400, b"even")

    with serving(answer) as server:
        bodies = [{"number": i} for i in range(6)]
        found = asyncio.run(service(server.url).post_each(bodies, lambda index, answer: (index, answer)))
    assert found[1::2] == [(1, 2), (3, 6), (5, 10)]
    assert all(isinstance(error, ServiceError) and "'even'" in str(error) for error in found[::2])


def test_a_server_that_answers_nothing_is_not_sent_what_waits_behind_requests_that_were_given_up():
    """Two requests at a time have two tries each; eight more would."""
    with serving(lambda request: (503, b"busy")) as server:
        bodies = [{"number": i} for i in range(10)]
        found = asyncio.run(
            service(server.url, tries=2, max_requests=2).post_each(bodies, lambda index, answer: answer)
        )
        assert len(server.requests) == 4
    assert all(isinstance(error, ServiceError) and f"{server.url} answered with 503" in str(error) for error in found)


def test_a_server_that_stops_answering_is_not_sent_all_that_waits():
    """Of ten requests, one after the other, four are answered and three given up: three are not sent."""
    with serving(lambda request: double(request) if request.body["number"] < 4 else (503, b"busy")) as server:
        bodies = [{"number": i} for i in range(10)]
        found = asyncio.run(
            service(server.url, tries=1, max_requests=1).post_each(bodies, lambda index, answer: answer)
        )
        assert len(server.requests) == 7
    assert found[:4] == [0, 2, 4, 6]
    assert all(
        isinstance(error, ServiceError) and f"{server.url} answered with 503" in str(error) for error in found[4:]
    )


def test_a_server_that_answers_some_requests_is_sent_all():
    def answer(request: Request) -> Answer:
        return (503, b"busy") if request.body["number"] == 1 else double(request)

    with serving(answer) as server:
        bodies = [{"number": i} for i in range(10)]
        found = asyncio.run(
            service(server.url, tries=2, max_requests=1).post_each(bodies, lambda index, answer: answer)
        )
    assert [found[0], *found[2:]] == [2 * i for i in range(10) if i != 1] and isinstance(found[1], ServiceError)


@pytest.mark.parametrize("status", [301, 400, 401, 404])
def test_other_failures_are_asked_once_and_the_server_is_quoted(status):
    """RWD-06."""
    with serving(lambda request: (status, b"no such model")) as server:
        with pytest.raises(ServiceError, match=f"{server.url} answered with {status} .*'no such model'"):
            ask(service(server.url))
        assert len(server.requests) == 1


def test_a_server_that_stays_busy_is_given_up_after_all_tries_with_its_url():
    """RWD-06."""
    with serving(lambda request: (503, b"busy")) as server:
        with pytest.raises(ServiceError, match=rf"{server.url} answered with 503 .*This was try 3 of 3\.$"):
            ask(service(server.url, tries=3))
        assert len(server.requests) == 3


def test_a_server_that_is_gone_is_an_error_with_its_url():
    url = refusing_url()
    with pytest.raises(ServiceError, match=rf"{url} could not be reached: ConnectError.*This was try 2 of 2\.$"):
        ask(service(url, tries=2))


def test_a_server_that_is_slow_is_cut_off_at_the_timeout():
    release = threading.Event()

    def slow(request: Request) -> Answer:
        release.wait(30)
        return double(request)

    with serving(slow) as server:
        started = time.monotonic()
        with pytest.raises(ServiceError, match=rf"{server.url} did not answer within 0\.1 seconds.*try 2 of 2"):
            ask(service(server.url, tries=2, timeout_seconds=0.1))
        assert time.monotonic() - started < 10
        release.set()


@pytest.mark.parametrize(("urls", "first"), [(["http://a"], 1.0), (["http://a", "http://b"], 0.0)])
def test_each_wait_is_twice_as_long_but_the_next_server_is_asked_at_once(urls, first):
    """RWD-06: 1, 2, 4 and 8 seconds, and up to one more."""
    backoff, tries = JSONService(urls, backoff_seconds=1.0)._wait(), RetryCallState(Retrying(), None, (), {})
    for shortest in (first, 2.0, 4.0, 8.0):
        assert shortest <= backoff(tries) <= (shortest + 1.0 if shortest else 0.0)
        tries.attempt_number += 1


@pytest.mark.parametrize("content", [b"<html>login</html>", b'{"a": ', b"", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_an_error_and_not_asked_again(content):
    with serving(lambda request: (200, content)) as server:
        with pytest.raises(ServiceError, match=f"{server.url} answered with no JSON"):
            ask(service(server.url))
        assert len(server.requests) == 1


def test_an_answer_that_its_reader_refuses_is_an_error_with_the_url():
    def read(index: int, answer: Any) -> Any:
        raise ValueError("scores must be three: it has two.")

    with (
        serving(double) as server,
        pytest.raises(
            ServiceError,
            match=rf"{server.url} gave an answer that cannot be used: scores must be three.* It was '0'\.$",
        ),
    ):
        asyncio.run(service(server.url).post_all([{"number": 0}], read))


def test_one_failure_ends_the_others_at_once():
    release = threading.Event()

    def answer(request: Request) -> Answer:
        if request.body["number"] == 0:
            return 400, b"bad"
        release.wait(30)
        return double(request)

    with serving(answer) as server:
        started = time.monotonic()
        with pytest.raises(ServiceError, match="answered with 400"):
            ask(service(server.url, timeout_seconds=30.0), 20)
        assert time.monotonic() - started < 10
        release.set()


def test_the_key_is_sent_and_shown_nowhere():
    with serving(lambda request: (401, f"{request.headers['Authorization']} is wrong".encode())) as server:
        with pytest.raises(ServiceError) as caught:
            ask(service(server.url, api_key="s3cret"))
        assert server.requests[0].headers["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(caught.value) and "Bearer *** is wrong" in str(caught.value)


def test_the_key_is_not_shown_by_the_reader_of_an_answer_either():
    def read(index: int, answer: Any) -> Any:
        raise ValueError(f"{answer!r} is no number.")

    with (
        serving(lambda request: ok(request.headers["Authorization"])) as server,
        pytest.raises(ServiceError) as caught,
    ):
        asyncio.run(service(server.url, api_key="s3cret").post_all([{}], read))
    assert "s3cret" not in str(caught.value) and "'Bearer ***' is no number." in str(caught.value)


def test_a_key_that_cannot_be_sent_is_refused_unseen(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "s3cr\net")
    with pytest.raises(ValueError, match=r"^SOME_KEY must hold printable ASCII") as caught:
        api_key_of("SOME_KEY")
    assert "s3cr" not in str(caught.value)
    monkeypatch.setenv("SOME_KEY", " s3cret\n")
    assert api_key_of("SOME_KEY") == "s3cret"
    monkeypatch.delenv("SOME_KEY")
    assert api_key_of("SOME_KEY") is None
