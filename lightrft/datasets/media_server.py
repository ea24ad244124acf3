"""Media server: the process that forks a rank's media workers, and what these do.

It is a process of its own since a rank cannot be forked: it has threads, CUDA and process groups. Nor can it be started
by multiprocessing, whose processes would run the user's training script again. What it imports, its workers share.
"""

import os
import pickle
import signal
import socket
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

from lightrft.datasets.media_files import MediaError
from lightrft.datasets.media_inputs import MediaInputs, MediaProcessor, MediaRequest
from lightrft.datasets.media_sizes import MediaLimits

START = b"s"


@dataclass(frozen=True)
class MediaFailure:
    """Why there are no inputs."""

    message: str
    is_media: bool
    """The item is at fault, and not this code or what is installed."""


def serve(fd: int) -> None:
    """Forks a worker for each connection that the rank sends, until the rank ends or closes this one."""
    # Workers that end are nobody's concern: the rank sees it from their connection.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=fd) as control:
        pretrain, limits = pickle.loads(_received(control))
        processor = loaded(pretrain, limits)
        while True:
            message, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                # A worker at work does not see that the rank has gone, and may hang. All are of this process's group.
                os.killpg(0, signal.SIGKILL)
            _fork(control, fds[0], processor)
            os.close(fds[0])


def _received(control: socket.socket) -> bytes:
    """What comes first: its length in eight bytes, and as many."""
    with control.makefile("rb", buffering=0) as file:
        length = int.from_bytes(_exactly(file, 8))
        return _exactly(file, length)


def _exactly(file: "socket.SocketIO", length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = file.read(length - len(data))
        if not more:
            raise ConnectionError("the rank has gone")
        data += more
    return data


def loaded(pretrain: str, limits: MediaLimits) -> MediaProcessor | MediaFailure:
    try:
        return MediaProcessor.load(pretrain, limits)
    except Exception:
        return MediaFailure(f"a media worker could not load its processor:\n{traceback.format_exc()}", is_media=False)


def _fork(control: socket.socket, fd: int, processor: MediaProcessor | MediaFailure) -> None:
    if os.fork() > 0:
        return
    code = 1
    try:
        control.close()
        work(Connection(fd), processor)
        code = 0
    except (EOFError, ConnectionError):
        code = 0  # The rank has gone.
    except BaseException:
        traceback.print_exc()
    finally:
        # Nothing that the server has registered for its own end may run here.
        os._exit(code)


def work(connection: Connection, processor: MediaProcessor | MediaFailure) -> None:
    """One worker: says which process it is, then answers request by request."""
    connection.send(os.getpid())
    while True:
        request: MediaRequest = connection.recv()
        connection.send(processor if isinstance(processor, MediaFailure) else answer(processor, request))


def answer(processor: MediaProcessor, request: MediaRequest) -> MediaInputs | MediaFailure:
    try:
        return processor(request)
    except MediaError as error:
        return MediaFailure(str(error), is_media=True)
    except Exception:
        return MediaFailure(f"a media worker failed:\n{traceback.format_exc()}", is_media=False)
