"""A teacher behind a server: its log-probs are the local teacher's, and its faults are nobody's zeros."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from lightrft.config import ModelConfig
from lightrft.strategy.utils.collectives import PhaseError
from lightrft.trainer.remote_teacher import API_KEY, PROTOCOLS, RemoteTeacher, Text, check_remote_teacher
from lightrft.types import Experience
from tests import tiny_models
from tests.distributed.runs import fsdp
from tests.http_servers import Answer, Request, Server, TeacherAnswers, ok, refusing_url, serving

APIS = ("openai", "sglang")
TEXT = Text([5, 6, 7, 8], 2)
"""A prompt of two tokens and a response of two."""
LAST_ID = len(tiny_models.CHARACTERS) - 1


@pytest.fixture(scope="module")
def teacher() -> TeacherAnswers:
    return TeacherAnswers(tiny_models.random_model(tiny_models.qwen2(), seed=7))


@pytest.fixture(scope="module")
def server(teacher: TeacherAnswers) -> Iterator[Server]:
    with serving(teacher) as server:
        yield server


def samples_of(rank: int) -> list[Experience]:
    """Ragged; the last id of the vocabulary is among them."""
    return [*tiny_models.random_samples(12, seed=rank), tiny_models.sample([3], [LAST_ID, 4, LAST_ID])]


def scores(options: ModelConfig, steps: int = 1) -> list[list[list[float]]]:
    """What the teacher makes of this rank's samples, step by step."""
    found = []
    with fsdp() as strategy:
        teacher = RemoteTeacher(strategy, options)
        for _ in range(steps):
            teacher.submit(samples_of(strategy.rank))
            found.append([values.tolist() for values in teacher.result()])
    return found


@pytest.mark.parametrize("api", APIS)
def test_each_rank_gets_its_own_samples_log_probs(two_ranks, server, teacher, api):
    options = ModelConfig("unused", teacher_url=f"{server.url}/,{server.url}", teacher_api=api)
    for rank, found in enumerate(two_ranks.run(scores, options, 2)):
        samples = samples_of(rank)
        assert found[0] == found[1]
        for sample, values in zip(samples, found[0], strict=True):
            expected = teacher.log_probs(sample.input_ids.tolist())[sample.response_start - 1 :]
            assert len(values) == sample.num_response_tokens
            assert values == pytest.approx(expected, abs=1e-6)


def asked_before_the_result(options: ModelConfig) -> bool:
    """Waits at the server, whose /seen answers when it has been asked for log-probs."""
    with fsdp() as strategy:
        teacher = RemoteTeacher(strategy, options)
        teacher.submit(samples_of(strategy.rank))
        is_seen = httpx.post(f"{options.teacher_url}/seen", json={}, timeout=20).json()
        teacher.result()
    return is_seen


def test_servers_are_asked_while_the_rank_does_other_things(two_ranks, teacher):
    is_asked = threading.Event()

    def answer(request: Request) -> Answer:
        if request.path == "/seen":
            return ok(is_asked.wait(10))
        is_asked.set()
        return teacher(request)

    with serving(answer) as server:
        assert two_ranks.run(asked_before_the_result, ModelConfig("unused", teacher_url=server.url)) == [True, True]


def failure(options: ModelConfig) -> str:
    with fsdp() as strategy:
        teacher = RemoteTeacher(strategy, options)
        teacher.submit(samples_of(strategy.rank) if strategy.rank == 1 else [])
        try:
            teacher.result()
        except PhaseError as error:
            return str(error)
    return "no error"


def test_a_failure_on_one_rank_is_raised_on_both_with_the_url(two_ranks):
    """RWD-06."""
    with serving(lambda request: (400, b"too long")) as server:
        messages = two_ranks.run(failure, ModelConfig("unused", teacher_url=server.url))
    for message in messages:
        assert message.startswith("teacher failed on rank 1 of 2.")
        assert f"{server.url}/v1/completions answered with 400 Bad Request: 'too long'" in message


# Replies


def replied(api: str, change: Callable[[list[Any]], Any]) -> Any:
    """A right reply to the request for `TEXT`, with its list of entries changed."""
    entries = {
        "openai": [None, *({str(i): {"logprob": -i / 4}} for i in TEXT.ids[1:])],
        "sglang": [[None, 6, None], *([-i / 4, i, None] for i in TEXT.ids[2:])],
    }[api]
    changed = change(entries)
    if api == "openai":
        return {"choices": [{"prompt_logprobs": changed}]}
    return {"meta_info": {"input_token_logprobs": changed}}


@pytest.mark.parametrize("api", APIS)
def test_log_probs_of_the_response_are_read(api):
    # -7/4 and -8/4.
    assert PROTOCOLS[api].read(replied(api, lambda entries: entries), TEXT) == [-1.75, -2.0]


def with_value(api: str, value: Any) -> Any:
    entry = {"openai": {"8": {"logprob": value}}, "sglang": [value, 8, None]}[api]
    return replied(api, lambda entries: [*entries[:-1], entry])


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), float("-inf"), -9999.0, None, "-1.0", True, 0.5, [], -(10**400)]
)
def test_what_is_no_log_prob_is_refused(api, value):
    with pytest.raises(ValueError, match=r"^log-probs must be finite numbers that are at most 0"):
        PROTOCOLS[api].read(with_value(api, value), TEXT)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("change", [lambda entries: entries[:-1], lambda entries: [*entries, entries[-1]]])
def test_a_wrong_count_is_refused_with_both_numbers(api, change):
    expected = {"openai": 4, "sglang": 3}[api]
    with pytest.raises(ValueError, match=rf"one entry must be there for each of {expected} tokens: it has \d\."):
        PROTOCOLS[api].read(replied(api, change), TEXT)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "change",
    [
        lambda entries: [entries[0], *entries[:0:-1]],
        lambda entries: [*entries[:-1], None],
        lambda entries: [*entries[:-1], {}],
        lambda entries: [*entries[:-1], 3.0],
    ],
)
def test_entries_of_other_tokens_are_refused(api, change):
    with pytest.raises(ValueError, match=r"^entries must be of the tokens that were sent: .* for token \d\."):
        PROTOCOLS[api].read(replied(api, change), TEXT)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("answer", [None, [], {}, {"choices": []}, {"choices": [{"text": "x"}]}, {"meta_info": 3}])
def test_a_reply_without_log_probs_is_refused(api, answer):
    with pytest.raises(ValueError, match="must be in it"):
        PROTOCOLS[api].read(answer, TEXT)


# The question before anything loads


def out_of_vocabulary(request: Request) -> Answer:
    ids = request.body["prompt"]
    return (400, b"token id out of vocabulary") if max(ids) > 16 else ok({})


@pytest.mark.parametrize("api", APIS)
def test_servers_that_score_the_last_token_of_the_vocabulary_pass(server, api):
    options = ModelConfig("unused", teacher_url=server.url, teacher_api=api)
    before = len(server.requests)
    check_remote_teacher(options, LAST_ID)
    [request] = server.requests[before:]
    assert (request.body.get("prompt") or request.body["input_ids"]) == [17, 17]


def test_the_question_may_be_asked_in_a_notebook_whose_thread_runs_a_loop(server):
    async def cell() -> None:
        check_remote_teacher(ModelConfig("unused", teacher_url=server.url), LAST_ID)

    asyncio.run(cell())


def test_a_server_with_fewer_tokens_is_refused_at_the_start(server):
    with serving(out_of_vocabulary) as smaller:
        options = ModelConfig("unused", teacher_url=f"{server.url},{smaller.url}")
        with pytest.raises(ValueError, match=r"of which 17 is the last: .*token id out of vocabulary.*--teacher_url"):
            check_remote_teacher(options, LAST_ID)


def test_a_server_that_is_not_there_is_refused_at_the_start():
    url = refusing_url()
    with pytest.raises(
        ValueError, match=rf"^every server of teacher_url must give .*{url}/generate could not be reached"
    ):
        options = ModelConfig("unused", teacher_url=url, teacher_api="sglang")
        check_remote_teacher(options, LAST_ID)


def test_the_key_comes_from_the_environment(monkeypatch, teacher):
    monkeypatch.setenv(API_KEY, "s3cret")

    def locked(request: Request) -> Answer:
        return teacher(request) if request.headers.get("Authorization") == "Bearer s3cret" else (401, b"no")

    with serving(locked) as server:
        options = ModelConfig("unused", teacher_url=server.url)
        check_remote_teacher(options, LAST_ID)
        monkeypatch.delenv(API_KEY)
        with pytest.raises(ValueError, match=f"answered with 401.*{API_KEY}"):
            check_remote_teacher(options, LAST_ID)


def test_nan_in_a_reply_is_an_error_on_all_ranks_and_no_number(two_ranks, teacher):
    def answer(request: Request) -> Answer:
        reply = teacher.of_vllm(request.body)
        entry = reply["choices"][0]["prompt_logprobs"][-1]
        entry[next(iter(entry))]["logprob"] = float("nan")
        return 200, json.dumps(reply).encode()

    with serving(answer) as server:
        messages = two_ranks.run(failure, ModelConfig("unused", teacher_url=server.url))
    assert all("log-probs must be finite numbers that are at most 0: nan." in message for message in messages)
