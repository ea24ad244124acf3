"""JSONService against real servers and their faults."""

import asyncio
import threading
import time
from typing import Any

import pytest

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
        release.wait(5)
        return double(request)

    with serving(slow) as server:
        started = time.monotonic()
        with pytest.raises(ServiceError, match=rf"{server.url} did not answer within 0\.1 seconds.*try 2 of 2"):
            ask(service(server.url, tries=2, timeout_seconds=0.1))
        assert time.monotonic() - started < 2
        release.set()


@pytest.mark.parametrize("content", [b"<html>login</html>", b'{"a": ', b"", b"\xff"])
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
        pytest.raises(ServiceError, match=f"{server.url} gave an answer that cannot be used: scores must be three"),
    ):
        asyncio.run(service(server.url).post_all([{"number": 0}], read))


def test_one_failure_ends_the_others_at_once():
    release = threading.Event()

    def answer(request: Request) -> Answer:
        if request.body["number"] == 0:
            return 400, b"bad"
        release.wait(5)
        return double(request)

    with serving(answer) as server:
        started = time.monotonic()
        with pytest.raises(ServiceError, match="answered with 400"):
            ask(service(server.url), 20)
        assert time.monotonic() - started < 2
        release.set()


def test_the_key_is_sent_and_shown_nowhere():
    with serving(lambda request: (401, f"{request.headers['Authorization']} is wrong".encode())) as server:
        with pytest.raises(ServiceError) as caught:
            ask(service(server.url, api_key="s3cret"))
        assert server.requests[0].headers["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(caught.value) and "Bearer *** is wrong" in str(caught.value)


def test_a_key_that_cannot_be_sent_is_refused_unseen(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "s3cr\net")
    with pytest.raises(ValueError, match=r"^SOME_KEY must hold printable ASCII") as caught:
        api_key_of("SOME_KEY")
    assert "s3cr" not in str(caught.value)
    monkeypatch.setenv("SOME_KEY", " s3cret\n")
    assert api_key_of("SOME_KEY") == "s3cret"
    monkeypatch.delenv("SOME_KEY")
    assert api_key_of("SOME_KEY") is None
