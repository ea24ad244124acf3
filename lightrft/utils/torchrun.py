"""What a script tells torchrun."""

import faulthandler
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from io import UnsupportedOperation
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def record(main: Callable[P, R]) -> Callable[P, R]:
    """torch's `record`, which tells torchrun of the first error, but for the import of torch: an error's alone.

    So --help and wrong flags are answered without torch.
    """

    @wraps(main)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        # A caller may have put something else in the place of stderr.
        with suppress(UnsupportedOperation):
            faulthandler.enable(all_threads=True)
        try:
            return main(*args, **kwargs)
        except Exception as error:
            _record(error)
            raise

    return recorded


def _record(error: Exception) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
