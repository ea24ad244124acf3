"""Functions of users: found by `module:function` or `path/to/file.py:function`, as some flags take them."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def is_function_spec(value: str) -> bool:
    """Whether a flag's value names a user's function, and not one that is built in."""
    return ":" in value


def load_function(flag: str, spec: str) -> Callable[..., Any]:
    """The function that the value `spec` of a flag names. What its module raises propagates.

    Raises:
        ValueError: there is no such module, file or function.
    """
    module_name, _, function_name = spec.rpartition(":")
    is_file = module_name.endswith(".py")
    members = vars(_load_file(flag, Path(module_name)) if is_file else _import(flag, module_name))
    if function_name not in members:
        functions = [name for name, member in members.items() if inspect.isfunction(member)]
        raise ValueError(
            f"{flag} must name a function: {module_name} has no {function_name}. "
            f"Its functions: {', '.join(functions) or 'none'}."
        )
    function = members[function_name]
    if not callable(function):
        raise ValueError(f"{flag} must name a function: {spec} is {type(function).__name__}.")
    return function


@contextmanager
def module_errors(flag: str, spec: str) -> Iterator[None]:
    """Turns what the user's own module raises inside, while it loads, into a ValueError that names its line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        line = _failing_line(error)
        if line is None:
            raise
        what = error.msg if isinstance(error, SyntaxError) else error
        reason = f"{type(error).__name__}: {what} ({line})"
        raise ValueError(f"{flag} must name a module that loads: {spec}: {reason}. Correct the module.") from error


def function_spec(function: Callable[..., Any]) -> str:
    """`module:function` of a function; of another callable that of its class."""
    named = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _import(flag: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that the user's own module lacks is for its own traceback to name.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{flag} must name a module that Python finds: no module {error.name}. "
            "Put its folder on PYTHONPATH, or write path/to/file.py:function."
        ) from error


def _load_file(flag: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{flag} must name an existing file: {path} is no file.")
    return _module_of_file(path.resolve(), path.stat().st_mtime_ns)


@cache
def _module_of_file(path: Path, changed_ns: int) -> ModuleType:
    """The module in a file; a reward and a loss in the same file share it, until the file has changed."""
    # A name that hides no importable module: the file may be called math.py.
    spec = importlib.util.spec_from_file_location(f"lightrft_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a function's module up there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _failing_line(error: BaseException) -> str | None:
    """File and line of the module whose top level failed, or None where none did."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{frame.filename}, line {frame.lineno}" for frame in frames if frame.name == "<module>"]
    if isinstance(error, SyntaxError):
        lines.append(f"{error.filename}, line {error.lineno}")
    return lines[0] if lines else None
