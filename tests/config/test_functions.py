import os
from functools import partial

import pytest

from lightrft.config.functions import function_spec, load_function, module_errors

SOURCE = "calls = []\ndef first():\n    calls.append(1)\ndef second():\n    return calls\n"


def test_functions_of_one_file_share_its_module_until_the_file_changes(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    load_function("reward_fn", f"{path}:first")()
    assert load_function("policy_loss", f"{path}:second")() == [1]
    os.utime(path, ns=(1, 1))
    assert load_function("policy_loss", f"{path}:second")() == []


def test_what_is_missing_is_named_with_the_flag_that_asks_for_it(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    for spec, message in (
        ("no_such_module:f", "policy_loss must name a module that Python finds: no module no_such_module. "),
        (f"{tmp_path}/gone.py:f", f"policy_loss must name an existing file: {tmp_path}/gone.py is no file."),
        (f"{path}:f", f"policy_loss must name a function: {path} has no f. Its functions: first, second."),
        (f"{path}:calls", f"policy_loss must name a function: {path}:calls is list."),
    ):
        with pytest.raises(ValueError) as caught:
            load_function("policy_loss", spec)
        assert str(caught.value).startswith(message)


def test_what_a_module_raises_while_it_loads_is_told_with_its_line_and_other_errors_pass(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("\n\nint('x')\n")
    with pytest.raises(ValueError) as caught, module_errors("policy_loss", f"{path}:f"):
        load_function("policy_loss", f"{path}:f")
    assert str(caught.value) == (
        f"policy_loss must name a module that loads: {path}:f: ValueError: invalid literal for int() with base 10: 'x' "
        f"({path}, line 3). Correct the module."
    )
    with pytest.raises(KeyError), module_errors("policy_loss", "mine:f"):
        {}["of ours"]


def test_a_function_is_named_by_its_module_and_another_callable_by_its_class():
    assert function_spec(partial) == "functools:partial"
    assert function_spec(partial(int)) == "functools:partial"
    assert function_spec(function_spec) == "lightrft.config.functions:function_spec"


def test_a_script_that_ends_itself_while_it_loads_is_told_too(tmp_path):
    """It would end the run without a word."""
    path = tmp_path / "script.py"
    path.write_text("import sys\nsys.exit(0)\n")
    told = pytest.raises(ValueError, match=r"SystemExit: 0 \(.*script\.py, line 2\)")
    with told, module_errors("reward_fn", f"{path}:f"):
        load_function("reward_fn", f"{path}:f")
