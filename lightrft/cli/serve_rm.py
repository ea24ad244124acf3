"""`lightrft serve-rm`: a reward function or a reward model behind HTTP, for --remote_rm_url."""

import importlib.util
import math
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from lightrft.cli.reward_rounds import Served
from lightrft.cli.served_function import ServedFunction
from lightrft.config import usage_errors
from lightrft.rewards.json_service import api_key_of
from lightrft.rewards.remote import API_KEY
from lightrft.utils.logging import setup_logging

MIB = 2**20
GRACE_SECONDS = 30
"""For the requests that are under way when the server is told to stop."""


@dataclass(frozen=True)
class Arguments:
    reward_fn: str | None = None
    """A built-in reward's name, or a function as module:function or path/to/file.py:function."""
    reward_pretrain: str | None = None
    """Folder (or hub id) of a sequence classifier with one label, read with its own tokenizer and chat template."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for other machines."""
    port: int = 5000
    """Port to listen at; 0 takes one that is free."""
    reward_workers: int = 2
    """Processes that grade, where --reward_fn is a function of one response."""
    reward_timeout_seconds: float = 30.0
    """Grading a response may take this long. Read by --reward_fn."""
    bf16: bool = False
    """Compute in bf16. Read by --reward_pretrain."""
    max_tokens_per_micro_batch: int = 16384
    """Tokens in a forward of --reward_pretrain; a longer text is alone."""
    max_body_mib: int = 64
    """Size of a request at most."""


def main(argv: Sequence[str]) -> int:
    """Serves until SIGTERM or SIGINT; the requests that are under way then are answered."""
    arguments = tyro.cli(
        Arguments,
        prog="lightrft serve-rm",
        description=f"Serves rewards at /get_reward, for --remote_rm_url; {API_KEY} may hold a key that it asks for.",
        args=list(argv),
        use_underscores=True,
    )
    with usage_errors():
        check_arguments(arguments)
        api_key = api_key_of(API_KEY)
        listener = bound_socket(arguments.host, arguments.port)
        served = load(arguments)
    setup_logging()
    try:
        serve(served, listener, arguments.max_body_mib * MIB, api_key)
    finally:
        served.close()
    return 0


def check_arguments(arguments: Arguments) -> None:
    """Raises ValueError for what cannot be served."""
    if (arguments.reward_fn is None) == (arguments.reward_pretrain is None):
        raise ValueError("serve-rm serves one thing: set either --reward_fn or --reward_pretrain.")
    for name in ("reward_workers", "max_tokens_per_micro_batch", "max_body_mib"):
        if vars(arguments)[name] < 1:
            raise ValueError(f"{name} must be at least 1: {name}={vars(arguments)[name]}. Change --{name}.")
    if not 0 < arguments.reward_timeout_seconds < math.inf:
        raise ValueError(f"reward_timeout_seconds must be above 0: {arguments.reward_timeout_seconds}. Change it.")
    if arguments.bf16 and arguments.reward_pretrain is None:
        raise ValueError("bf16 is how a reward model computes: --reward_fn has none. Leave --bf16 out.")
    if not 0 <= arguments.port < 2**16:
        raise ValueError(f"port must be from 0 to 65535: {arguments.port}.")
    for package in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"serve-rm needs the package {package}, which is not installed. Run pip install 'lightrft[serve]'."
            )


def bound_socket(host: str, port: int) -> socket.socket:
    """The server's address, taken before anything loads; nobody can connect yet."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(f"host and port must be free: {host}:{port}: {error}. Set --host or --port.") from error
    return listener


def load(arguments: Arguments) -> Served:
    """What grades."""
    if arguments.reward_fn is not None:
        return ServedFunction(arguments.reward_fn, arguments.reward_workers, arguments.reward_timeout_seconds)
    assert arguments.reward_pretrain is not None, "check_arguments asks for one of the two"
    # They take seconds to import, and functions need none of them.
    import torch

    from lightrft.cli.served_model import ServedModel
    from lightrft.strategy.utils.devices import rank_device

    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    return ServedModel(arguments.reward_pretrain, rank_device(0), dtype, arguments.max_tokens_per_micro_batch)


def serve(served: Served, listener: socket.socket, max_body_bytes: int, api_key: str | None) -> None:
    import uvicorn

    from lightrft.cli.reward_app import PATH, reward_app

    app = reward_app(served, max_body_bytes, api_key)
    settings = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
    # The server takes these signals while it runs, and sends them to the process once more when it has stopped.
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    host, port, *_ = listener.getsockname()
    print(f"{served.name} at http://{host}:{port}{PATH}", flush=True)
    uvicorn.Server(settings).run(sockets=[listener])
