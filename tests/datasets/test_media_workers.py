"""What a rank's media workers do when something hangs, fails or is asked for between other requests."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

import pytest

from lightrft.config import DataConfig
from lightrft.datasets import media_workers
from lightrft.datasets.media import MediaLoader
from lightrft.datasets.media_files import MediaError
from lightrft.datasets.media_inputs import MediaInputs, MediaRequest
from lightrft.datasets.media_sizes import MediaLimits
from lightrft.datasets.media_workers import MediaWorkers
from lightrft.types import PromptExample
from tests import tiny_media
from tests.datasets.media_samples import image

TEXT = MediaRequest("hi", {})
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def pretrain(tmp_path_factory) -> str:
    return tiny_media.save_processor(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def shared(pretrain) -> Iterator[MediaWorkers]:
    """With one process, which has worked already."""
    workers = MediaWorkers(pretrain, MediaLimits(), 1)
    workers.submit(TEXT).result()
    yield workers
    workers.close()


def hanging(folder: Path) -> MediaRequest:
    """A prompt whose image is never read to its end: a pipe that nobody writes to."""
    os.mkfifo(folder / "pipe.png")
    return MediaRequest(MARK, {"image": [str(folder / "pipe.png")]})


def wait_for(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_closing_ends_a_decoder_that_hangs_at_once(pretrain, tmp_path):
    workers = MediaWorkers(pretrain, MediaLimits(), 1)
    workers.submit(TEXT).result()
    [worker] = workers._idle
    assert workers._server is not None
    pids = [worker.pid, workers._server._process.pid]
    hung, waiting = workers.submit(hanging(tmp_path)), workers.submit(TEXT)
    wait_for(lambda: worker in workers._busy)
    start = time.monotonic()
    workers.close()
    assert time.monotonic() - start < 5
    with pytest.raises(MediaError, match=r"pipe\.png: the process that decoded it has died$"):
        hung.result()
    assert waiting.cancelled()
    wait_for(lambda: not any(map(is_there, pids)), seconds=5)


def test_closing_does_not_wait_for_a_process_that_is_about_to_start(pretrain):
    """Its server has yet to import what reads media, which takes seconds."""
    workers = MediaWorkers(pretrain, MediaLimits(), 1)
    starting = workers.submit(TEXT)
    wait_for(lambda: workers._server is not None)
    start = time.monotonic()
    workers.close()
    assert time.monotonic() - start < 5
    with pytest.raises(RuntimeError, match=r"a media worker has ended before it began|media workers were closed"):
        starting.result()


def test_a_decoder_that_hangs_is_ended_when_its_time_is_over(shared, tmp_path, monkeypatch):
    [worker] = shared._idle
    with monkeypatch.context() as patch, pytest.raises(MediaError, match=r"pipe\.png: not decoded after 0\.5 s$"):
        patch.setattr(media_workers, "REQUEST_SECONDS", 0.5)
        shared.submit(hanging(tmp_path)).result()
    wait_for(lambda: not is_there(worker.pid), seconds=5)
    assert shared.submit(TEXT).result().prompt_ids
    assert not shared._busy and len(shared._idle) == 1


def test_a_request_that_cannot_be_sent_leaves_no_process_behind(shared):
    """Its error keeps everything alive that the call had: a process that is not ended would go on beside the next."""
    [worker] = shared._idle
    failed = shared.submit(MediaRequest(MARK, {"image": [lambda: None]}))
    error = failed.exception()
    assert isinstance(error, pickle.PicklingError | AttributeError)
    wait_for(lambda: not is_there(worker.pid), seconds=5)
    assert shared.submit(TEXT).result().prompt_ids
    assert not shared._busy and len(shared._idle) == 1


RANK = """
import sys
from transformers import AutoProcessor
from lightrft.config import DataConfig
from lightrft.datasets.media import MediaLoader
pretrain, pipe, mark = sys.argv[1:]
loader = MediaLoader(pretrain, AutoProcessor.from_pretrained(pretrain), DataConfig(), num_workers=1)
loader.expanded_ids([("hi", {})])
print(loader._workers._idle[0].pid, flush=True)
loader.expanded_ids([(mark, {"image": [pipe]})] * 3)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_rank_that_is_stopped_does_not_wait_for_a_decoder_that_hangs_and_leaves_none(pretrain, tmp_path, number):
    """By Ctrl-C while it checks its rows, and by what it cannot see."""
    pipe = hanging(tmp_path).media["image"][0]
    command = [sys.executable, "-c", RANK, pretrain, pipe, MARK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None and rank.stderr is not None
        worker = int(rank.stdout.readline())
        time.sleep(0.5)
        rank.send_signal(number)
        try:
            rank.wait(20)
        finally:
            rank.kill()
        assert number == signal.SIGKILL or rank.stderr.read().rstrip().endswith("KeyboardInterrupt")
    wait_for(lambda: not is_there(worker), seconds=5)


class Server:
    """Gives a worker that answers, with a gate before its first answer, and then workers that never start."""

    def __init__(self, *spec: Any) -> None:
        self.is_alive = True
        self.gate = Event()
        self.connections: list[Connection] = []

    def start(self) -> Connection:
        ours, theirs = Pipe()
        self.connections.append(theirs)
        if len(self.connections) == 1:
            Thread(target=self.work, args=(theirs,), daemon=True).start()
        return ours

    def work(self, connection: Connection) -> None:
        connection.send(os.getpid())
        while True:
            try:
                request = connection.recv()
            except EOFError:
                return
            self.gate.wait(60)
            connection.send(MediaInputs([len(request.text)]))

    def close(self) -> None:
        for connection in self.connections[1:]:
            connection.close()


def test_a_process_that_starts_slowly_does_not_keep_requests_from_those_that_work(monkeypatch):
    monkeypatch.setattr(media_workers, "MediaServer", Server)
    workers = MediaWorkers("unused", MediaLimits(), 2)
    first = workers.submit(MediaRequest("a", {}))
    wait_for(lambda: workers._busy)
    server = cast(Server, workers._server)
    never = workers.submit(MediaRequest("bb", {}))
    wait_for(lambda: len(server.connections) == 2)
    server.gate.set()
    assert first.result(5).prompt_ids == [1]
    assert workers.submit(MediaRequest("ccc", {})).result(5).prompt_ids == [3]
    assert not never.done()
    workers.close()
    assert isinstance(never.exception(5), RuntimeError)


class Recorder:
    """In the place of workers: keeps the texts that it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def submit(self, request: MediaRequest) -> "Future[MediaInputs]":
        self.asked.append(request.text)
        made: Future[MediaInputs] = Future()
        made.set_result(MediaInputs([1]))
        return made

    def close(self) -> None:
        self.asked.append("close")


@pytest.fixture
def recorded(pretrain) -> tuple[MediaLoader, Recorder]:
    loader = MediaLoader(pretrain, tiny_media.qwen2_5_vl(), DataConfig(), num_workers=0)
    loader._workers.close()
    recorder = Recorder()
    loader._workers = cast(Any, recorder)
    return loader, recorder


def prompt(text: str) -> PromptExample:
    return PromptExample(0, text, [1], media={"image": [image(8, 8)]})


def test_an_evaluation_leaves_what_was_decoded_ahead_for_the_next_step(recorded):
    loader, recorder = recorded
    step, first, second = prompt("step"), prompt("first"), prompt("second")
    loader.prefetch([step], "step")
    loader.with_inputs([first])
    loader.prefetch([second], "batches")
    loader.with_inputs([second])
    loader.prefetch([], "batches")
    loader.with_inputs([step])
    assert recorder.asked == ["step", "first", "second"]


def test_what_was_decoded_ahead_is_forgotten_by_the_next_call_of_its_purpose(recorded):
    loader, recorder = recorded
    step, other = prompt("step"), prompt("other")
    loader.prefetch([step], "step")
    loader.prefetch([other, step], "step")
    loader.prefetch([other], "step")
    loader.with_inputs([step, other])
    assert recorder.asked == ["step", "other", "step"]
