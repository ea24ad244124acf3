"""What a start imports: nothing heavy before the flags are right, and of what only some runs need, nothing."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

import lightrft.trainer
from lightrft.trainer import SPMDPPOTrainer, SPMDPPOTrainerVL, spmd_ppo_trainer
from lightrft.utils.imports import large_imports

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ["gsm8k_geo3k/train_colocate.py", *(f"{path.parent.name}/train.py" for path in EXAMPLES.glob("*/train.py"))]
# A trainer of transformers' own, whose flags are not ours.
SCRIPTS.remove("sft/train.py")
POLICY, PAIRS = "gsm8k_geo3k/train_colocate.py", "reward_model/train.py"
BRINGS_MODELS = {"transformers", "lightrft.trainer.setup", "lightrft.trainer.reward_model_setup"}
FOR_SOME_RUNS = {
    *("deepspeed", "vllm", "sglang", "wandb", "fastapi", "uvicorn", "tensorboard", "matplotlib"),
    *("math_verify", "latex2sympy2_extended", "datasets", "pyarrow", "pandas", "av"),
}


def loaded_by(program: str, returncode: int, *argv: str) -> tuple[set[str], str]:
    """Modules that a program has imported at its end, and what it said on stderr."""
    at_exit = "import atexit, sys; atexit.register(lambda: print('loaded:', *sys.modules)); "
    command = [sys.executable, "-c", at_exit + program, *argv]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == returncode, ended.stderr
    return set(ended.stdout.rpartition("loaded: ")[2].split()), ended.stderr


def run(script: str) -> str:
    return f"import runpy; runpy.run_path({str(EXAMPLES / script)!r}, run_name='__main__')"


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_answers_help_without_torch(script):
    loaded, _ = loaded_by(run(script), 0, "--help")
    assert "lightrft.config.arguments" in loaded
    assert {"torch", "transformers"} & loaded == set()


@pytest.mark.parametrize("script", [POLICY, PAIRS])
def test_an_unknown_flag_is_told_without_torch(script):
    loaded, said = loaded_by(run(script), 2, "--no_such_flag")
    assert "--no_such_flag" in said or "--no-such-flag" in said
    assert {"torch", "transformers"} & loaded == set()


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (POLICY, "--pretrain unused --prompt_data unused --zero_stage 1 --fsdp", "error: zero_stage "),
        (PAIRS, "--pretrain unused --train_data unused --eval_steps 2", "error: eval_steps evaluates on eval_data"),
    ],
)
def test_flags_that_do_not_fit_each_other_are_told_before_models_are_imported(script, flags, message):
    loaded, said = loaded_by(run(script), 2, *flags.split())
    assert message in said
    assert {"torch", *BRINGS_MODELS} & loaded == set()


def test_trainers_import_nothing_that_only_some_runs_need():
    loaded, _ = loaded_by("import lightrft.trainer.spmd_ppo_trainer, lightrft.trainer.reward_model_trainer", 0)
    assert "transformers" in loaded
    assert FOR_SOME_RUNS & loaded == set()


def test_trainers_are_found_in_their_package_and_other_names_are_not():
    assert (SPMDPPOTrainer, SPMDPPOTrainerVL) == (spmd_ppo_trainer.SPMDPPOTrainer, spmd_ppo_trainer.SPMDPPOTrainerVL)
    with pytest.raises(AttributeError, match="no attribute 'SPMDTrainer'"):
        _ = lightrft.trainer.SPMDTrainer


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_is_collected_after_large_imports_as_before(was_enabled):
    enabled = gc.isenabled()
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(ImportError), large_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if enabled else gc.disable)()


def test_what_was_garbage_before_large_imports_is_collected_and_so_is_what_a_second_one_finds():
    program = """
import gc, weakref
from lightrft.utils.imports import large_imports

class Node: pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

before = cycle()
with large_imports():
    import torch
between = cycle()
with large_imports():
    import transformers
after = cycle()
gc.collect()
assert [ref() for ref in (before, between, after)] == [None] * 3
"""
    loaded_by(program, 0)


def test_what_large_imports_made_is_out_of_the_collectors_sight_and_nothing_is_that_comes_later():
    program = """
import gc
from lightrft.utils.imports import large_imports

counts = []
for _ in range(2):
    with large_imports():
        import torch
    counts.append(gc.get_freeze_count())
    made = [[] for _ in range(100)]
first, second = counts
assert first == second > 10_000 > len(gc.get_objects()), (counts, len(gc.get_objects()))
"""
    loaded_by(program, 0)
