import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import lightrft

PACKAGE = Path(lightrft.__file__).parent
LAYERS = (
    {"config", "types"},
    {"ops", "utils"},
    {"models"},
    {"datasets", "rewards", "strategy"},
    {"trainer"},
    {"cli"},
)
SIBLINGS = ({"types", "config"}, {"ops", "utils"})
"""Packages of one layer that may import each other; the others of a layer may not."""
WITHOUT_TORCH = {"config", "rewards", "__init__"}
HEAVY = {"torch", "transformers", "accelerate", "peft", "jaxtyping", "tensorboard"}
ADAPTERS = {
    "vllm": "strategy/vllm_utils/",
    "sglang": "strategy/sglang_utils/",
    "deepspeed": "strategy/deepspeed/",
    "wandb": "utils/",
}


class Import(NamedTuple):
    module: str
    """Absolute dotted name."""
    is_lazy: bool
    """Inside a function."""


def imports(source: str, module: str) -> Iterator[Import]:
    """All imports of a module, those in functions and under TYPE_CHECKING as well.

    Args:
        source: Its text.
        module: Its dotted name, which relative imports count from; a package's ends with `.__init__`.
    """

    def visit(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, is_lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            # `from lightrft import ops` names a package in its alias.
            yield from (Import(f"{base}.{alias.name}", is_lazy) for alias in node.names)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_lazy or is_function)

    return visit(ast.parse(source), False)


def level(package: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if package in layer)


def violations(source: str, module: str) -> list[str]:
    """What breaks the import rules in a module of the package, such as `lightrft.ops.kl`."""
    owner = module.split(".")[1]
    found = []
    for name, is_lazy in imports(source, module):
        root, *rest = name.split(".")
        if root == "lightrft" and rest and not may_import(owner, rest[0]):
            found.append(f"{module} imports {name}")
        if root in HEAVY and owner in WITHOUT_TORCH:
            found.append(f"{module} imports {name}")
        if root in ADAPTERS and not (is_lazy and module.replace(".", "/").startswith(f"lightrft/{ADAPTERS[root]}")):
            found.append(f"{module} imports {name} outside a function of {ADAPTERS[root]}")
    return found


def may_import(owner: str, other: str) -> bool:
    if owner == other or other == "__version__":
        return True
    if owner == "__init__":
        return False
    if owner in WITHOUT_TORCH:
        return other == "config" and owner != "config"
    return level(other) < level(owner) or any({owner, other} <= siblings for siblings in SIBLINGS)


def modules() -> dict[str, str]:
    """Source of each module of the package, by dotted name."""
    paths = {path.relative_to(PACKAGE.parent).with_suffix(""): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(name.parts): path.read_text() for name, path in paths.items()}


def test_every_module_imports_only_what_its_layer_may():
    assert [violation for module, source in modules().items() for violation in violations(source, module)] == []


def test_each_backend_is_imported_in_one_file():
    files = defaultdict(set)
    for module, source in modules().items():
        for name, _ in imports(source, module):
            files[name.split(".")[0]].add(module)
    assert {name: files[name] for name in ADAPTERS if len(files[name]) > 1} == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lightrft.ops.kl", "import lightrft.models.actor"),
        ("lightrft.ops.kl", "def f():\n    from lightrft.strategy import engine"),
        ("lightrft.models.actor", "if TYPE_CHECKING:\n    from lightrft.trainer.ppo_trainer import PPOTrainer"),
        ("lightrft.datasets.prompts", "from lightrft.rewards.records import RewardInput"),
        ("lightrft.strategy.engine", "from ..datasets import prompts"),
        ("lightrft.strategy.utils.__init__", "from ...rewards import records"),
        ("lightrft.rewards.functions", "from lightrft import types"),
        ("lightrft.rewards.functions", "from lightrft.utils.logging import get_logger"),
        ("lightrft.rewards.functions", "def f():\n    import torch"),
        ("lightrft.config.checks", "from lightrft.types import PromptExample"),
        ("lightrft.config.checks", "import transformers.models"),
        ("lightrft.__init__", "from lightrft.config import Config"),
        ("lightrft.trainer.ppo_trainer", "from lightrft.cli import main"),
        ("lightrft.strategy.engine", "def f():\n    import vllm"),
        ("lightrft.strategy.vllm_utils.vllm_engine", "from vllm import LLM"),
        ("lightrft.utils.metrics", "class A:\n    import wandb"),
    ],
)
def test_a_forbidden_import_is_found(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lightrft.ops.kl", "import torch\nfrom lightrft.types import Experience\nfrom . import segments"),
        ("lightrft.strategy.engine", "from ..models import actor\nfrom .utils import collectives"),
        ("lightrft.rewards.functions", "from lightrft.config.arguments import REWARD_NAMES\nfrom .records import X"),
        ("lightrft.trainer.ppo_trainer", "from lightrft.rewards import functions\nfrom lightrft import strategy"),
        ("lightrft.strategy.vllm_utils.vllm_engine", "def f():\n    from vllm import LLM"),
        ("lightrft.cli.main", "import lightrft.trainer.ppo_trainer\nfrom lightrft import __version__"),
    ],
)
def test_an_allowed_import_passes(module, source):
    assert violations(source, module) == []


def test_the_package_its_config_and_its_rewards_start_without_torch():
    program = "import sys, lightrft, lightrft.rewards.functions, lightrft.config; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert HEAVY & set(loaded.stdout.split()) == set()
