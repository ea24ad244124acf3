"""HTTP servers for tests: one that a function answers for, a teacher's with the replies of engines, and programs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import PreTrainedModel

from lightrft.strategy.utils.devices import free_port

START_SECONDS = 280
"""An engine starts within it on a busy machine."""


@dataclass(frozen=True)
class Request:
    path: str
    body: Any
    headers: Mapping[str, str]
    connection: tuple[str, int]
    """Address of the client: the same for requests on one connection."""


Answer = tuple[int, bytes]
"""Status and body."""


@dataclass
class Server:
    """A running server."""

    url: str
    requests: list[Request] = field(default_factory=list)


class HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512
    """Connections that come at the same time are not refused."""


@contextmanager
def serving(answer: Callable[[Request], Answer]) -> Iterator[Server]:
    """A server on a port of its own that gives what `answer` says, which runs in a thread for each connection."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            request = Request(self.path, body, dict(self.headers), self.client_address)
            server.requests.append(request)
            status, content = answer(request)
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except BrokenPipeError:
                self.close_connection = True

        def log_message(self, *args: object) -> None: ...

    http_server = HTTPServer(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{http_server.server_address[1]}")
    threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    http_server.shutdown()
    http_server.server_close()


@contextmanager
def launched(
    command: Sequence[str], environment: Mapping[str, str], url: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A program whose `url` answers with 200 once it serves; it ends with all its processes."""
    with log.open("w") as output:
        settings = os.environ | environment
        process = subprocess.Popen(command, env=settings, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not serves(url):
            said = log.read_text()[-8000:]
            assert process.poll() is None and time.monotonic() < deadline, f"the server did not start:\n{said}"
            time.sleep(0.1)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True)
class RewardServer:
    """A `lightrft serve-rm` process."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def reward_server(folder: Path, *flags: str, **environment: str) -> Iterator[RewardServer]:
    """`lightrft serve-rm` with these flags; `folder` gets its log."""
    base, log = refusing_url(), folder / "reward_server.log"
    port = base.rpartition(":")[2]
    command = [sys.executable, "-m", "lightrft.cli.main", "serve-rm", "--port", port, *flags]
    with launched(command, environment, f"{base}/health", log) as process:
        yield RewardServer(f"{base}/get_reward", process, log)


def serves(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def refusing_url() -> str:
    """Where nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


def ok(content: Any) -> Answer:
    return 200, json.dumps(content).encode()


class TeacherAnswers:
    """What vLLM's and SGLang's servers say of a model's log-probs, in the JSON that they write."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Answer:
        if request.path == "/v1/completions":
            return ok(self.of_vllm(request.body))
        assert request.path == "/generate"
        return ok(self.of_sglang(request.body))

    def of_vllm(self, body: Mapping[str, Any]) -> Any:
        assert body["prompt_logprobs"] == 0
        entries = [
            {str(token_id): {"logprob": value, "rank": 1, "decoded_token": "x"}}
            for token_id, value in zip(body["prompt"][1:], self.log_probs(body["prompt"]), strict=True)
        ]
        return {
            "object": "text_completion",
            "choices": [{"index": 0, "text": "x", "prompt_logprobs": [None, *entries]}],
        }

    def of_sglang(self, body: Mapping[str, Any]) -> Any:
        assert body["return_logprob"]
        ids, start = body["input_ids"], body["logprob_start_len"]
        shown = [token_id if token_id < self.model.config.vocab_size - 1 else 0 for token_id in ids[start:]]
        values = [None, *self.log_probs(ids)[start:]]
        entries = [[value, token_id, None] for value, token_id in zip(values, shown, strict=True)]
        return {"text": "", "meta_info": {"prompt_tokens": len(ids), "input_token_logprobs": entries}}

    def log_probs(self, ids: list[int]) -> list[float]:
        """Of every token but the first."""
        with self._lock, torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
