import ast
from pathlib import Path

import pytest

import lightrft
from lightrft.config.flags import flag_types

PACKAGE = Path(lightrft.__file__).parent


@pytest.fixture(scope="module")
def attributes_read() -> set[str]:
    """Names that code outside `config/` reads as `something.name`."""
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "config"]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("flag", flag_types())
def test_every_flag_is_read_outside_the_config(flag, attributes_read):
    assert flag in attributes_read
