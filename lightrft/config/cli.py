"""Command line: flags and `--config FILE.yaml` to a Config, with usage errors said once."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, TypeVar

import tyro

from lightrft.config.arguments import Config
from lightrft.config.flags import field_of_spelling, flag_types, spelling
from lightrft.config.translate import translate
from lightrft.config.yaml_file import dump_yaml, yaml_tokens

__all__ = ["dump_yaml", "parse_config", "parse_flags", "usage_errors"]

DESCRIPTION = "LightRFT trains a language model by reinforcement learning."
CONFIG_FILE = (
    "--config FILE.yaml reads flags from a flat mapping of the same names; flags of the command line come before it."
)
T = TypeVar("T")
MISTAKES = (ValueError, NotImplementedError, OSError)
"""How a user's mistakes are raised."""
HEAD_START_SECONDS = 10.0
"""torchrun ends all ranks when one of them exits: a rank gives those that speak before it this long to say why."""


def parse_config(argv: Sequence[str] | None = None, prog: str | None = None) -> Config:
    """Config of a command line; a usage error ends the process with exit code 2.

    Args:
        argv: Arguments without the program's name; None takes those of the process.
        prog: Name of the program in the help text.
    """
    with usage_errors():
        translation = translate(sys.argv[1:] if argv is None else argv)
    _warn(translation.warnings)
    return parse_flags(Config, DESCRIPTION, translation.tokens, prog)


def parse_flags(
    config_type: type[T], description: str, argv: Sequence[str] | None = None, prog: str | None = None
) -> T:
    """`parse_config` of another dataclass of owners; public LightRFT's flags are not known."""
    with usage_errors():
        tokens = _expand(list(sys.argv[1:] if argv is None else argv), config_type)
    try:
        with contextlib.nullcontext() if _rank() == 0 else contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(
                config_type,
                prog=prog,
                description=f"{description}\n{CONFIG_FILE}",
                args=tokens,
                config=(tyro.conf.OmitArgPrefixes,),
                use_underscores=True,
                console_outputs=_rank() == 0,
            )
    except SystemExit as stop:
        if stop.code:
            _fail(None)
        raise


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns a user's mistake inside into `error: ...` on stderr and exit code 2 on every rank.

    Rank 0 says it. A rank that is still there after that says its own: a folder that its node lacks, or, on another
    node than rank 0's, what all ranks found.
    """
    try:
        yield
    except MISTAKES as error:
        _fail(f"error: {error}")


def _fail(message: str | None) -> NoReturn:
    time.sleep(_turn() * HEAD_START_SECONDS)
    if message is not None:
        print(message if _rank() == 0 else f"[rank {_rank()}] {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _warn(warnings: Sequence[str]) -> None:
    if _rank() == 0:
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)


def _turn() -> int:
    """How many others speak before this rank: rank 0, then the first rank of its own node."""
    if _rank() == 0:
        return 0
    return 1 if os.environ.get("LOCAL_RANK") == "0" else 2


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _expand(argv: list[str], config_type: type) -> list[str]:
    """Tokens for tyro: the command line's own, then those of the config file for flags that it does not name."""
    given = _named_flags(argv, config_type)
    tokens = ["--no_enable_engine_sleep" if spelling(token) == "--disable_engine_sleep" else token for token in argv]
    if "config" not in given:
        return tokens
    start = given["config"]
    _, equals, path = tokens.pop(start).partition("=")
    if not equals and tokens[start:] and not tokens[start].startswith("-"):
        path = tokens.pop(start)
    if not path:
        raise ValueError("--config needs a value. Write --config FILE.yaml.")
    groups = yaml_tokens(Path(path), config_type)
    return tokens + [token for name, group in groups.items() if name not in given for token in group]


def _named_flags(argv: list[str], config_type: type) -> dict[str, int]:
    """Position of each flag in the command line, under the name of its field.

    Raises:
        ValueError: a flag is given twice (tyro silently takes the last), or a switch is given a value.
    """
    fields, kinds = field_of_spelling(config_type), flag_types(config_type)
    positions: dict[str, int] = {}
    for position, (token, following) in enumerate(pairwise([*argv, "--"])):
        name = fields.get(spelling(token))
        if name is None:
            continue
        if name in positions:
            raise ValueError(f"A flag may be given once: {argv[positions[name]]} and {token}. Drop one of them.")
        positions[name] = position
        if kinds.get(name) is bool and ("=" in token or not following.startswith("-")):
            written = token if "=" in token else f"{token} {following}"
            raise ValueError(f"A switch takes no value: {written}. Write --{name} or --no_{name}.")
    return positions
