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
from threading import Lock

from lightrft.datasets.media_files import MediaError, shown
from lightrft.datasets.media_inputs import MediaInputs, MediaProcessor, MediaRequest
from lightrft.datasets.media_server import START, MediaFailure, answer
from lightrft.datasets.media_sizes import MediaLimits

START_SECONDS = 120.0
"""How long a process may take until it works; the first waits for imports."""
REQUEST_SECONDS = 300.0
"""How long a prompt's media may take: a decoder that hangs is ended then."""
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
        num_workers: Processes; with 0, a thread of this one does the work, which nothing ends where it hangs.
    """

    def __init__(self, pretrain: str, limits: MediaLimits, num_workers: int) -> None:
        self._spec = (pretrain, limits)
        self._threads = ThreadPoolExecutor(max(1, num_workers), thread_name_prefix="media")
        self._own = MediaProcessor.load(pretrain, limits) if num_workers == 0 else None
        self._server: MediaServer | None = None
        self._lock = Lock()
        """Of what follows; nobody waits for a process while holding it."""
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._is_closed = False

    def submit(self, request: MediaRequest) -> "Future[MediaInputs]":
        """The inputs to come, or MediaError with the item that is at fault."""
        return self._threads.submit(self._inputs, request)

    def close(self) -> None:
        """Ends all processes, at work or not; what was submitted and has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            # Threads that wait for one of these see its end.
            for worker in self._busy:
                worker.kill()
            for worker in self._idle:
                worker.connection.close()
            self._idle = []
            server, self._server = self._server, None
        if server is not None:
            server.close()
        self._threads.shutdown(wait=True)

    def _inputs(self, request: MediaRequest) -> MediaInputs:
        said = answer(self._own, request) if self._own is not None else self._asked(request)
        if isinstance(said, MediaInputs):
            return said
        raise MediaError(said.message) if said.is_media else RuntimeError(said.message)

    def _asked(self, request: MediaRequest) -> MediaInputs | MediaFailure:
        worker = self._worker()
        try:
            said = worker.answer(request)
        except (EOFError, ConnectionError):
            failure = "the process that decoded it has died"
        except TimeoutError:
            worker.kill()
            failure = f"not decoded after {REQUEST_SECONDS:g} s"
        except BaseException:
            # It would answer the next request with what this one asked for.
            worker.kill()
            self._drop(worker)
            raise
        else:
            self._give_back(worker)
            return said
        self._drop(worker)
        return MediaFailure(f"{_items(request)}: {failure}", is_media=True)

    def _worker(self) -> "Worker":
        """One that is idle, or a new one: there are never more of them than threads."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError("media workers were closed.")
            if self._idle:
                worker = self._idle.pop()
                self._busy.add(worker)
                return worker
            if self._server is None or not self._server.is_alive:
                self._server = MediaServer(*self._spec)
            connection = self._server.start()
        worker = Worker(connection)
        with self._lock:
            self._busy.add(worker)
            is_closed = self._is_closed
        if is_closed:
            self._drop(worker)
            raise RuntimeError("media workers were closed.")
        return worker

    def _give_back(self, worker: "Worker") -> None:
        """For the next request."""
        with self._lock:
            if not self._is_closed:
                self._busy.remove(worker)
                self._idle.append(worker)
                return
        self._drop(worker)

    def _drop(self, worker: "Worker") -> None:
        """Without its connection a worker that waits for requests ends."""
        with self._lock:
            self._busy.remove(worker)
        worker.connection.close()


class Worker:
    """A process that decodes, as the rank sees it.

    Raises:
        TimeoutError, RuntimeError: It does not start.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        try:
            if not connection.poll(START_SECONDS):
                raise TimeoutError(f"a media worker has not started after {START_SECONDS:g} s.")
            self.pid: int = connection.recv()
        except EOFError as error:
            connection.close()
            raise RuntimeError("a media worker has ended before it began: its output is above.") from error
        except BaseException:
            connection.close()
            raise

    def answer(self, request: MediaRequest) -> MediaInputs | MediaFailure:
        """What it says to a request.

        Raises:
            TimeoutError: Nothing, in time.
            EOFError, ConnectionError: It has died.
        """
        self.connection.send(request)
        if not self.connection.poll(REQUEST_SECONDS):
            raise TimeoutError
        return self.connection.recv()

    def kill(self) -> None:
        """Its connection stays open here: the thread that waits for it sees the end there."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


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
        """Workers end when their own connections are closed; those that are still to be forked never begin."""
        self._control.close()
        # It may be about to load the processor, and has nothing to put in order.
        self._process.kill()
        self._process.wait()


def _items(request: MediaRequest) -> str:
    return ", ".join(shown(item) for items in request.media.values() for item in items)
