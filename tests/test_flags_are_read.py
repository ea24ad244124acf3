import ast
import inspect
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import get_type_hints

import pytest

import lightrft
from lightrft.config import Config
from lightrft.config.flags import flag_types

PACKAGE = Path(lightrft.__file__).parent
OWNERS = get_type_hints(Config)
"""Dataclass of each owner, by the owner's name: `rollout` has RolloutConfig."""
CONFIG = "Config"
CONFIG_NAMES = ("config", "args")
"""Variables and attributes that hold the whole Config, unless a parameter of that name is annotated otherwise."""
KINDS_OF_CLASSES = {kind.__name__: owner for owner, kind in OWNERS.items()} | {Config.__name__: CONFIG}


def flags_behind(owner: type, name: str) -> set[str]:
    """The flags that reading `name` reads: itself, or what a property of the owner's looks at."""
    if name in get_type_hints(owner):
        return {name}
    getter = getattr(vars(owner).get(name), "fget", None)
    if getter is None:
        return set()
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(getter))))
    reads = [node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"]
    return {flag for read in reads for flag in flags_behind(owner, read)}


class FlagReads(ast.NodeVisitor):
    """Collects the flags that a source reads from their owner, in `flags`.

    An owner is `config.<owner>`, a variable that was assigned one, or a parameter annotated with its dataclass.
    """

    def __init__(self) -> None:
        self.flags: set[str] = set()
        self._kinds: dict[str, str | None] = {}
        """What a variable holds: an owner, the whole Config, or something else (None)."""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = OWNERS.get(self._kind(node.value) or "")
        if isinstance(node.ctx, ast.Load) and owner is not None:
            self.flags |= flags_behind(owner, node.attr)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        outer = dict(self._kinds)
        arguments = node.args
        for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self._kinds[parameter.arg] = self._kind_of_parameter(parameter)
        self.generic_visit(node)
        self._kinds = outer

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, part_value in zip(target.elts, value.elts, strict=True):
                self._bind(part, part_value)
        elif isinstance(target, ast.Name):
            self._kinds[target.id] = self._kind(value)
        else:
            self.visit(target)

    def _kind(self, node: ast.expr) -> str | None:
        match node:
            case ast.Name(id=name):
                return self._kinds.get(name, CONFIG if name in CONFIG_NAMES else None)
            case ast.Attribute(attr=name) if name in CONFIG_NAMES:
                return CONFIG
            case ast.Attribute(value=value, attr=name) if name in OWNERS and self._kind(value) == CONFIG:
                return name
        return None

    def _kind_of_parameter(self, parameter: ast.arg) -> str | None:
        if parameter.annotation is None:
            return CONFIG if parameter.arg in CONFIG_NAMES else None
        names = {node.id for node in ast.walk(parameter.annotation) if isinstance(node, ast.Name)}
        return next((kind for name, kind in KINDS_OF_CLASSES.items() if name in names), None)


def flags_read(sources: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for source in sources:
        reads = FlagReads()
        reads.visit(ast.parse(source))
        found |= reads.flags
    return found


@pytest.fixture(scope="module")
def flags_read_outside_the_config() -> set[str]:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "config"]
    return flags_read(path.read_text() for path in files)


@pytest.mark.parametrize("flag", flag_types())
def test_every_flag_is_read_outside_the_config(flag, flags_read_outside_the_config):
    assert flag in flags_read_outside_the_config


@pytest.mark.parametrize(
    ("source", "flag"),
    [
        ("print(config.rollout.temperature)", "temperature"),
        ("print(self.config.rollout.temperature)", "temperature"),
        ("print(self.strategy.config.train.seed)", "seed"),
        ("def f(args): return args.strategy.fsdp", "fsdp"),
        ("def f(settings: Config): return settings.strategy.fsdp", "fsdp"),
        ("def f(config):\n rollout = config.rollout\n return rollout.stop", "stop"),
        ("model, data, rollout = config.model, config.data, config.rollout\nprint(data.max_samples)", "max_samples"),
        ("def f(self):\n rates = self.config.optimizer\n return rates.l2", "l2"),
        ("def f(self):\n algorithm = self.config.algorithm\n def g(): return algorithm.gamma\n return g", "gamma"),
        ("def f(self):\n train = self.config.train\n return lambda: train.seed", "seed"),
        ("def f(data: DataConfig): return data.input_key", "input_key"),
        ("def f(options: OptimizerConfig | None): return options.l2", "l2"),
        ("async def f(*, train: TrainConfig): return train.seed", "seed"),
        ("whole = config\nprint(whole.train.seed)", "seed"),
    ],
)
def test_a_flag_that_is_read_from_its_owner_is_found(source, flag):
    assert flags_read([source]) == {flag}


def test_a_property_of_the_owner_reads_its_flags():
    source = "print(config.rollout.keeps_engine_weights)"
    assert flags_read([source]) == {"enable_engine_sleep", "engine_sleep_level", "engine_type"}


@pytest.mark.parametrize(
    "source",
    [
        "watch.stop()",
        "print(self.seed)",
        "print(params.temperature, self.params.temperature)",
        "print(config.temperature)",
        "print(config.train.temperature)",
        "print(self.rollout.temperature)",
        "config.rollout.temperature = 1.0",
        "def f(rollout): return rollout.temperature",
        "def f(rollout: Rollout): return rollout.temperature",
        "def f(config: PretrainedConfig): return config.rollout.temperature",
        "def f():\n rollout = config.rollout\ndef g(): return rollout.temperature",
        "rollout = config.rollout\nrollout = draw()\nprint(rollout.temperature)",
        "rollout = config.rollout\ndef f(rollout): return rollout.temperature",
        "rollout = other.rollout\nprint(rollout.temperature)",
        "model, rollout = config.rollout, config.model\nprint(rollout.temperature)",
        "print('config.rollout.temperature')",
    ],
)
def test_an_attribute_of_the_same_name_elsewhere_is_not_taken_for_a_flag(source):
    assert flags_read([source]) == set()
