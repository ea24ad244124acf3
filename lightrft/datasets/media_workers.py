"""MediaWorkers: a rank's side of the processes that decode media."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock

from lightrft.datasets.media_files import MediaError, shown
from lightrft.datasets.media_inputs import MediaInputs, MediaLimits, MediaProcessor, MediaRequest
from lightrft.datasets.media_server import START, MediaFailure, answer

START_SECONDS = 120.0
"""How long a process may take until it works; the first waits for imports."""
REQUEST_SECONDS = 300.0
"""How long a prompt's media may take: a decoder that hangs is ended then."""
CLOSE_SECONDS = 10.0
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lightrft.datasets.media_server import serve; serve(int(sys.argv[2]))"
)
ENVIRONMENT = {
    # Each process is one of many, and the device is the trainer's.
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # Tokenizers that have started threads cannot be forked.
    "TOKENIZERS_PARALLELISM": "false",
}


class MediaWorkers:
    """Makes the inputs of prompts with media, some at the same time; its processes end with this one, however it ends.

    Args:
        pretrain: Folder (or hub id) of the model, whose processor each process has.
        limits: Of the flags.
        num_workers: Processes; with 0, a thread of this one does the work.
    """

    def __init__(self, pretrain: str, limits: MediaLimits, num_workers: int) -> None:
        self._spec = (pretrain, limits)
        self._threads = ThreadPoolExecutor(max(1, num_workers), thread_name_prefix="media")
        self._own = MediaProcessor.load(pretrain, limits) if num_workers == 0 else None
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        self._server: MediaServer | None = None
        self._lock = Lock()

    def submit(self, request: MediaRequest) -> "Future[MediaInputs]":
        """The inputs to come, or MediaError with the item that is at fault."""
        return self._threads.submit(self._inputs, request)

    def close(self) -> None:
        """Ends all processes; what was submitted and has not begun is dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().connection.close()
        if self._server is not None:
            self._server.close()

    def _inputs(self, request: MediaRequest) -> MediaInputs:
        said = answer(self._own, request) if self._own is not None else self._asked(request)
        if isinstance(said, MediaInputs):
            return said
        raise MediaError(said.message) if said.is_media else RuntimeError(said.message)

    def _asked(self, request: MediaRequest) -> MediaInputs | MediaFailure:
        worker = self._worker()
        try:
            worker.connection.send(request)
            if not worker.connection.poll(REQUEST_SECONDS):
                worker.kill()
                return MediaFailure(f"{_items(request)}: not decoded after {REQUEST_SECONDS:g} s", is_media=True)
            said = worker.connection.recv()
        except (EOFError, ConnectionError):
            worker.connection.close()
            return MediaFailure(f"{_items(request)}: the process that decoded it has died", is_media=True)
        self._idle.put(worker)
        return said

    def _worker(self) -> "Worker":
        """One that is idle, or a new one: there are never more of them than threads."""
        with self._lock:
            if not self._idle.empty():
                return self._idle.get()
            if self._server is None or not self._server.is_alive:
                self._server = MediaServer(*self._spec)
            return Worker(self._server.start())


class Worker:
    """A process that decodes, as the rank sees it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        if not connection.poll(START_SECONDS):
            raise TimeoutError(f"a media worker has not started after {START_SECONDS:g} s.")
        try:
            self.pid: int = connection.recv()
        except EOFError as error:
            raise RuntimeError("a media worker has ended before it began: its output is above.") from error

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()


class MediaServer:
    """The process that forks the workers."""

    def __init__(self, pretrain: str, limits: MediaLimits) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps([*map(str, sys.path)]), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT},
                pass_fds=[theirs.fileno()],
                # Ctrl-C in a terminal is for the ranks alone.
                process_group=0,
            )
        spec = pickle.dumps((pretrain, limits))
        self._control.sendall(len(spec).to_bytes(8) + spec)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self) -> Connection:
        """The connection to a new worker."""
        ours, theirs = Pipe()
        # A server that has died is seen by reading from the worker.
        with theirs, suppress(ConnectionError):
            socket.send_fds(self._control, [START], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Workers end when their own connections are closed."""
        self._control.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _items(request: MediaRequest) -> str:
    return ", ".join(shown(item) for items in request.media.values() for item in items)
