"""Loggers of this package: one line once, from rank 0, beside a live display without breaking it."""

import logging
import sys

from rich import get_console
from rich.logging import RichHandler

ROOT = "lightrft"


def get_logger(name: str) -> logging.Logger:
    """Logger below `lightrft`, so that `setup_logging` governs it; `name` is usually `__name__`."""
    return logging.getLogger(name if name == ROOT or name.startswith(f"{ROOT}.") else f"{ROOT}.{name}")


def setup_logging(rank: int = 0) -> None:
    """Rank 0 logs from INFO on, the others from WARNING on with their rank in the line.

    On a terminal rank 0 writes through rich's own console, which a live display shares; otherwise lines go to stderr.
    """
    handler = _terminal_handler() if rank == 0 and get_console().is_terminal else _plain_handler(rank)
    logger = logging.getLogger(ROOT)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False


def _terminal_handler() -> logging.Handler:
    handler = RichHandler(console=get_console(), show_path=False, log_time_format="%H:%M:%S", rich_tracebacks=False)
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler


def _plain_handler(rank: int) -> logging.Handler:
    who = "" if rank == 0 else f"[rank {rank}] "
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {who}%(message)s", datefmt="%H:%M:%S"))
    return handler
