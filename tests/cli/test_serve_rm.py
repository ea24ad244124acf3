"""`lightrft serve-rm`: functions and models behind HTTP, in this process and in one of its own."""

import asyncio
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from fastapi import FastAPI
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrft.cli.main import main
from lightrft.cli.reward_app import reward_app
from lightrft.cli.reward_rounds import Rounds
from lightrft.cli.served_function import ServedFunction
from lightrft.cli.served_model import ServedModel
from lightrft.config import RewardConfig
from lightrft.rewards.json_service import JSONService
from lightrft.rewards.records import Fault, Grade, RewardInput
from lightrft.rewards.remote import RemoteRewardSource
from lightrft.rewards.remote_protocol import body_of
from tests import tiny_models
from tests.http_servers import reward_server
from tests.rewards.rows import row

FUNCTIONS = """
import asyncio, os, time


async def number(response):
    await asyncio.sleep(float(os.environ.get("DELAY", "0")))
    return float(response)


def right(response, label):
    return {"score": float(response == label), "length": len(response)}


def slow(responses):
    print("grading", flush=True)
    time.sleep(float(os.environ["SECONDS"]))
    return [1.0] * len(responses)


def hangs(response):
    if response == "9**9**9":
        time.sleep(999)
    return 1.0


def waits(responses):
    while "wait" in responses and not os.path.exists(os.environ["RELEASED"]):
        time.sleep(0.01)
    return [1.0] * len(responses)


def together(responses):
    if "bad" in responses:
        raise RuntimeError("the grader broke")
    return [1.0] * len(responses)


def leveled(response, level):
    return float(level)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("functions") / "graders.py"
    path.write_text(FUNCTIONS)
    return str(path)


# Requests, in this process


class Recorder:
    """Rewards each response with its length, and keeps what it was given at a time."""

    name = "recorder"
    trouble = None

    def __init__(self, rows_of_round: int = 512, seconds: float = 0.0) -> None:
        self.rows_of_round = rows_of_round
        self.seconds = seconds
        self.rounds: list[list[str]] = []

    def check_row(self, sample: RewardInput) -> None:
        if sample.label == "none":
            raise ValueError("label must be there.")

    def grade(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Grade]:
        self.rounds.append([sample.response for sample in inputs])
        time.sleep(self.seconds)
        if any(sample.response == "raise" for sample in inputs):
            raise RuntimeError("the grader broke")
        if any(sample.response == "hang" for sample in inputs):
            raise TimeoutError("the grader has not ended after 600 s")
        return [self._grade(sample) for sample in inputs]

    def close(self) -> None: ...

    def _grade(self, sample: RewardInput) -> Grade:
        if sample.response == "fail":
            return Grade(None, fault=Fault("error", "it failed:\nTraceback\nRuntimeError: the grader broke"))
        return Grade(float(len(sample.response)))


def health(app: FastAPI) -> Any:
    async def answer() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.get("/health")

    found = asyncio.run(answer())
    return found.status_code, found.json()


def post(app: FastAPI, *bodies: Any, headers: Mapping[str, str] = {}, path: str = "/get_reward") -> list[Any]:
    """Status and JSON for each body, bytes or what becomes JSON; all are sent at once."""
    contents = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]

    async def answers() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await asyncio.gather(*(client.post(path, content=one, headers=headers) for one in contents))

    return [(answer.status_code, answer.json()) for answer in asyncio.run(answers())]


def body(*responses: str, **fields: Any) -> Any:
    return {"prompts": ["p"] * len(responses), "responses": list(responses), **fields}


def test_each_request_of_a_round_has_its_own_rewards():
    recorder = Recorder()
    found = post(reward_app(recorder, 1000), body("a", "bbb"), body("cc"), body(), path="/")
    assert found == [(200, {"rewards": rewards}) for rewards in ([1.0, 3.0], [2.0], [])]
    assert recorder.rounds == [["a", "bbb", "cc"]]


def test_requests_that_come_while_others_are_graded_share_the_next_round_up_to_its_size():
    """Of 2-row requests a round of 5 rows takes two; a request alone may have more."""
    recorder = Recorder(rows_of_round=5)
    found = post(reward_app(recorder, 1000), *[body("a", "a")] * 5, body(*"bbbbbbb"))
    assert all(status == 200 for status, _ in found)
    assert [len(responses) for responses in recorder.rounds] == [4, 4, 2, 7]


def test_a_round_that_hangs_is_not_tried_again_request_by_request():
    recorder = Recorder()
    found = post(reward_app(recorder, 1000), body("a"), body("hang"))
    assert found == [(500, {"detail": "TimeoutError: the grader has not ended after 600 s"})] * 2
    assert recorder.rounds == [["a", "hang"]]


def test_a_request_that_is_given_up_costs_the_others_of_its_round_nothing():
    async def grades_of_the_other() -> list[Grade]:
        rounds = Rounds(Recorder(seconds=0.2))
        given_up, other = (asyncio.create_task(rounds.grade([row(i, response="a")])) for i in range(2))
        await asyncio.sleep(0.1)
        given_up.cancel()
        return await asyncio.wait_for(other, 10)

    assert asyncio.run(grades_of_the_other()) == [Grade(1.0)]


def test_a_row_that_fails_is_500_for_its_request_alone_and_no_number():
    recorder = Recorder()
    found = post(reward_app(recorder, 1000), body("a"), body("b", "fail", rows=[7, 8]), body("raise"), body("cc"))
    assert found[0] == (200, {"rewards": [1.0]}) and found[3] == (200, {"rewards": [2.0]})
    assert found[1] == (500, {"detail": "row 8: it failed: RuntimeError: the grader broke"})
    assert found[2] == (500, {"detail": "RuntimeError: the grader broke"})


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"{", 422, "the body must be JSON"),
        (b"[" * 900, 422, "the body must be JSON"),
        ({}, 422, "the body must have prompts, and responses or query"),
        ({"prompts": ["a"], "responses": []}, 422, "prompts must have one entry a response: 1 for 0 responses"),
        (body("a", labels=["none"]), 422, "label must be there."),
        (body("a" * 1000), 413, "a request may have at most 1,000 bytes"),
    ],
)
def test_a_request_that_cannot_be_graded_is_told_why_in_one_message(content, status, message):
    recorder = Recorder()
    [(found, reply)] = post(reward_app(recorder, 1000), content)
    assert found == status and reply["detail"].startswith(message) and recorder.rounds == []


def test_only_who_has_the_key_is_answered_where_there_is_one():
    app = reward_app(Recorder(), 1000, "s3cret")
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer s3cre"}, 401),
        ({"Authorization": "Bearer s3cret"}, 200),
    ):
        [(found, reply)] = post(app, body("a"), headers=headers)
        assert found == status and "s3cret" not in str(reply)


def test_the_request_of_the_documentation_is_graded_as_it_says():
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    [(request, replied)] = re.findall(
        r"^curl http://localhost:5000/get_reward .* -d '(.*?)'\n(.*?)\n```$", page, re.M | re.S
    )
    served = ServedFunction("exact_match", 1, 30.0)
    [(status, reply)] = post(reward_app(served, 1000), request.encode())
    assert status == 200 and [reward["score"] for reward in reply["rewards"]] == json.loads(replied)["rewards"]


# Functions


def test_a_column_that_the_function_needs_and_the_request_lacks_is_422(functions):
    served = ServedFunction(f"{functions}:leveled", 1, 30.0)
    app = reward_app(served, 1000)
    assert post(app, body("a", extra={"level": [3]})) == [(200, {"rewards": [3.0]})]
    [(status, reply)] = post(app, body("a"))
    assert status == 422 and "leveled needs level" in reply["detail"]
    served.close()


def test_a_request_that_breaks_a_function_of_a_batch_does_not_break_the_others(functions):
    served = ServedFunction(f"{functions}:together", 1, 30.0)
    good, bad = post(reward_app(served, 1000), body("a", "b"), body("c", "bad"))
    assert good == (200, {"rewards": [1.0, 1.0]})
    assert bad[0] == 500 and bad[1]["detail"].endswith("RuntimeError: the grader broke")


def test_a_function_of_a_batch_that_hangs_shows_in_the_servers_health_until_it_comes_back(
    functions, tmp_path, monkeypatch
):
    """Else whoever watches the server, or shares work out to several, would go on to send it requests."""
    released = tmp_path / "released"
    monkeypatch.setenv("RELEASED", str(released))
    served = ServedFunction(f"{functions}:waits", 1, 0.05)
    app = reward_app(served, 1000)
    assert health(app) == (200, {"status": "ok"})
    [(status, first)] = post(app, body("wait"))
    started = time.monotonic()
    [again] = post(app, body("a"))
    assert again == (status, first) == (500, first) and time.monotonic() - started < 0.9
    assert re.search(r"waits has not ended after 1 s with its batch of 1 responses", first["detail"])
    assert health(app) == (503, {"detail": first["detail"].removeprefix("TimeoutError: ")})
    released.touch()
    deadline = time.monotonic() + 10
    while health(app)[0] != 200:
        assert time.monotonic() < deadline, "it is never well again"
        time.sleep(0.01)
    assert post(app, body("a")) == [(200, {"rewards": [1.0]})]


def test_a_response_that_hangs_its_grader_is_ungradable_and_the_others_have_rewards(functions):
    served = ServedFunction(f"{functions}:hangs", 2, 1.0)
    app = reward_app(served, 1000)
    post(app, body("1"))
    started = time.monotonic()
    [(status, reply)] = post(app, body("1", "9**9**9", "2"))
    assert time.monotonic() - started < 10 and status == 200
    first, hanging, last = reply["rewards"]
    assert (first, last) == (1.0, 1.0) and hanging["score"] is None
    assert "row 1: it took longer than --reward_timeout_seconds 1" in hanging["ungradable"]
    served.close()


# Models


TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ message['role'][0] }}+{{ message['content'] }}{% endfor %}"
)
"""Roles are one character, u+ and a+: `a` and `+` are in the vocabulary."""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tiny_models.save_classifier(tmp_path_factory.mktemp("classifier"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def own_scores(folder: str, texts: Sequence[str]) -> list[float]:
    """What transformers gives each text alone."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    model.config.pad_token_id = None
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).logits[0, 0].item() for text in texts]


def served_model(folder: str, max_tokens: int = 40) -> ServedModel:
    return ServedModel(folder, torch.device("cpu"), torch.float32, max_tokens)


def test_a_model_scores_each_text_as_transformers_does_alone(classifier):
    """Of 1 to 18 tokens, several micro-batches of at most 40."""
    rows = [row(i, prompt="1" * (i % 5), response="+2" * (i % 7) + "c") for i in range(30)]
    with asyncio.Runner() as runner:
        found = served_model(classifier).grade(rows, runner)
    expected = own_scores(classifier, [one.prompt + one.response for one in rows])
    assert torch.tensor(expected).std() > 0.01
    assert [grade.value for grade in found] == pytest.approx(expected, abs=1e-5)


def test_a_model_reads_messages_with_its_own_template(classifier):
    messages = [{"role": "user", "content": "1+1="}]
    rows = [row(0, prompt="<other>1+1=", response="2", messages=messages)]
    with asyncio.Runner() as runner:
        (grade,) = served_model(classifier).grade(rows, runner)
    (expected,) = own_scores(classifier, ["u+1+1=a+2"])
    assert grade.value == pytest.approx(expected, abs=1e-5)


def test_messages_that_the_template_does_not_take_are_422(classifier):
    app = reward_app(served_model(classifier), 1000)
    [(status, reply)] = post(app, body("2", messages=[[{"role": "tool", "content": "1"}]]))
    assert status == 422 and "no tools (roles: tool, assistant)" in reply["detail"]


def test_a_text_that_a_model_cannot_read_is_an_error_of_its_row(classifier):
    rows = [row(0), row(1, response="1" * 70), row(2, prompt="", response=""), row(3, response="~"), row(4)]
    served = served_model(classifier)
    served.tokenizer.add_tokens("~")
    with asyncio.Runner() as runner:
        first, long, empty, unknown, last = served.grade(rows, runner)
    assert [first.value, last.value] == pytest.approx(own_scores(classifier, ["0+0=0", "4+0=4"]), abs=1e-5)
    for grade, message in (
        (long, "prompt and response must fit into its context: they have 74 of its tokens, and the context is 64."),
        (empty, "prompt and response have no tokens for it."),
        # On a GPU an index out of range ends all work of the process.
        (unknown, "its tokenizer gives the token 19, and it has 18 embeddings."),
    ):
        assert grade.fault is not None and grade.fault.kind == "error" and grade.fault.message.startswith(message)


def test_a_score_that_is_not_finite_is_an_error(classifier):
    served = served_model(classifier)
    with torch.no_grad():
        served.model.model.get_parameter("score.weight").fill_(float("nan"))
    with asyncio.Runner() as runner:
        (grade,) = served.grade([row(0)], runner)
    assert grade == Grade(None, fault=Fault("error", "its score is nan."))


# The command


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "serve-rm serves one thing: set either --reward_fn or --reward_pretrain."),
        (["--reward_fn", "exact_match", "--reward_pretrain", "x"], "serve-rm serves one thing"),
        (["--reward_fn", "exact_match", "--bf16"], "bf16 is how a reward model computes: --reward_fn has none"),
        (["--reward_fn", "no_such"], "no_such is none of exact_match"),
        (["--reward_fn", "no_such.py:f"], "no_such.py is no file"),
        (["--reward_pretrain", "/no/folder"], "the model folder must exist: /no/folder does not"),
        (["--reward_fn", "exact_match", "--port", "99999"], "port must be from 0 to 65535: 99999."),
        (["--reward_fn", "exact_match", "--max_body_mib", "0"], "max_body_mib must be at least 1"),
        (["--reward_fn", "exact_match", "--reward_timeout_seconds", "nan"], "reward_timeout_seconds must be above 0"),
        (["--reward_fn", "exact_match", "--host", "256.0.0.1"], "host and port must be free: 256.0.0.1:5000"),
    ],
)
def test_what_cannot_be_served_is_one_error(flags, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["serve-rm", *flags])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.err.startswith("error: ") and message in captured.err


def test_a_port_that_is_taken_is_told_before_anything_loads(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit):
            main(["serve-rm", "--reward_pretrain", "/no/folder", "--port", str(port)])
    assert f"host and port must be free: 127.0.0.1:{port}: " in capsys.readouterr().err


def source(url: str, batch_size: int = RewardConfig().remote_rm_batch_size, **options: Any) -> RemoteRewardSource:
    return RemoteRewardSource(
        JSONService([url], **{"backoff_seconds": 0.01, "max_requests": 256} | options), batch_size
    )


def test_a_function_in_a_process_of_its_own_grades_for_remote_rm_url(functions, tmp_path):
    rows = [row(i, label=str(i % 3)) for i in range(20)]
    with reward_server(tmp_path, "--reward_fn", f"{functions}:right") as server, asyncio.Runner() as runner:
        found = source(server.url).grade(rows, runner)
        assert server.log.read_text().startswith(f"{functions}:right at {server.url}\n")
    assert found == [Grade(float(i < 3), {"length": float(len(str(i)))}) for i in range(20)]


def test_sigterm_answers_what_is_under_way_and_leaves_nothing_behind(functions, tmp_path):
    replies: list[httpx.Response] = []
    with reward_server(tmp_path, "--reward_fn", f"{functions}:slow", SECONDS="2") as server:
        asking = threading.Thread(target=lambda: replies.append(httpx.post(server.url, json=body("a"), timeout=30)))
        asking.start()
        while "grading" not in server.log.read_text():
            time.sleep(0.02)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(40) == 0
        asking.join(10)
        assert replies[0].json() == {"rewards": [1.0]}
        assert not any(child.is_running() for child in children)
        with pytest.raises(httpx.ConnectError):
            httpx.post(server.url, json=body("a"))


def test_a_server_that_is_killed_costs_the_rows_that_it_had_not_answered(functions, tmp_path):
    """One request after the other, of 1 row; it dies in the third."""
    with (
        reward_server(tmp_path, "--reward_fn", f"{functions}:slow", SECONDS="0.5") as server,
        asyncio.Runner() as runner,
    ):

        def kill() -> None:
            while server.log.read_text().count("grading") < 3:
                time.sleep(0.02)
            server.process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        found = source(server.url, 1, max_requests=1, tries=2).grade([row(i) for i in range(6)], runner)
        killer.join()
    assert found[:2] == [Grade(1.0), Grade(1.0)]
    for grade in found[2:]:
        assert grade.value is None and grade.fault is not None and grade.fault.kind == "error"
        assert f"{server.url} could not be reached" in grade.fault.message


# Speed


def seconds_of(action: Any) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def test_200_rows_at_once_are_graded_at_the_servers_own_rate(functions, tmp_path):
    """Against an httpx client that has its connections already and reads nothing; each request takes 0.4 s there."""
    rows = [row(i, prompt="1" * 500, response=str(i)) for i in range(200)]
    batch_size = RewardConfig().remote_rm_batch_size
    bodies = [body_of(rows[start : start + batch_size]) for start in range(0, 200, batch_size)]

    async def ask(client: httpx.AsyncClient) -> None:
        replies = await asyncio.gather(*(client.post(server.url, json=one) for one in bodies))
        assert all(reply.status_code == 200 for reply in replies)

    with (
        reward_server(tmp_path, "--reward_fn", f"{functions}:number", DELAY="0.4") as server,
        asyncio.Runner() as runner,
    ):
        client = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=256))
        graded = source(server.url, batch_size)
        assert graded.grade(rows, runner) == [Grade(float(i)) for i in range(200)]
        own = min(seconds_of(lambda: runner.run(ask(client))) for _ in range(3))
        ours = min(seconds_of(lambda: graded.grade(rows, runner)) for _ in range(3))
        runner.run(client.aclose())
    print(f"{200 / ours:.0f} rows/s, the server's own rate {200 / own:.0f}")
    assert own / ours >= 0.9
