"""Weights & Biases, the real package, offline and without a key."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightrft.config import ReportConfig
from tests.utils import wandb_file

OPTIONS = ReportConfig(use_wandb=True, wandb_project="p", wandb_run_name="n", wandb_group="g")


@pytest.fixture(autouse=True)
def no_login(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb_config"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def run_program(program: str) -> subprocess.CompletedProcess:
    """In a process of its own: the package keeps what it first read of the environment."""
    source = "from lightrft.config import ReportConfig\nfrom lightrft.utils.wandb_writer import WandbWriter\n" + program
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


WRITE = """
writer = WandbWriter({options!r}, {folder!r}, resumed={resumed})
writer.write_config("seed: 7\\nstop: [a]\\n")
for step in {steps}:
    writer.log(step, {{"reward/mean": step / 4, "eval/pass@2": 0.5}})
writer.log_samples([{{"prompt": "secret"}}])
if {ends_well}:
    writer.write_summary({{"reward_after": 0.75}})
writer.close()
"""


def write(folder: Path, steps: list[int], ends_well: bool = True, resumed: bool = False) -> None:
    program = WRITE.format(options=OPTIONS, folder=str(folder), steps=steps, ends_well=ends_well, resumed=resumed)
    ended = run_program(program)
    assert ended.returncode == 0, ended.stderr


def test_an_offline_run_holds_every_step_the_configuration_and_no_sample(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path, [0, 1, 2])
    assert wandb_file.history(tmp_path) == [
        {"step": step, "reward/mean": step / 4, "eval/pass@2": 0.5} for step in (0, 1, 2)
    ]
    found = wandb_file.config(tmp_path)
    assert (found["seed"], found["stop"]) == (7, ["a"])
    runs = [record.run for record in wandb_file.records(tmp_path) if record.run.run_id]
    assert [(run.project, run.display_name, run.run_group) for run in runs] == [("p", "n", "g")]
    assert wandb_file.exit_code(tmp_path) == 0
    assert b"secret" not in wandb_file.files(tmp_path)[0].read_bytes()


def test_a_run_without_a_summary_is_marked_as_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path, [1], ends_well=False)
    assert wandb_file.exit_code(tmp_path) == 1


def test_a_resumed_run_is_the_same_run_and_another_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for resumed in (False, True, False):
        write(tmp_path, [1], resumed=resumed)
        time.sleep(1.1)  # The folders are named by the second.
    first, again, other = wandb_file.run_ids(tmp_path)
    assert first == again != other


def test_without_a_login_the_remedy_is_named_and_nobody_is_asked(tmp_path):
    """CLI-03."""
    ended = run_program(f"WandbWriter({OPTIONS!r}, {str(tmp_path)!r}, resumed=False)")
    assert ended.returncode == 1
    assert "ValueError: use_wandb needs a login at Weights & Biases" in ended.stderr
    assert "set WANDB_MODE=offline" in ended.stderr
    assert not (tmp_path / "wandb").exists()


def test_no_process_is_left_where_a_run_dies_without_closing(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("LIGHTRFT_TEST_WANDB", str(tmp_path))
    ended = run_program(f"import os\nWandbWriter({OPTIONS!r}, {str(tmp_path)!r}, resumed=False)\nos._exit(9)")
    assert ended.returncode == 9
    deadline = time.monotonic() + 20
    while left := [p for p in psutil.process_iter() if is_of(p, str(tmp_path))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def is_of(process: psutil.Process, folder: str) -> bool:
    try:
        return process.environ().get("LIGHTRFT_TEST_WANDB") == folder
    except psutil.Error:
        return False


def test_the_package_is_imported_by_a_run_that_uses_it_alone():
    ended = run_program("import sys\nassert 'wandb' not in sys.modules")
    assert ended.returncode == 0, ended.stderr


def test_options_that_the_server_would_refuse_are_a_user_s_mistake(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    bad = ReportConfig(use_wandb=True, wandb_project="a/b")
    ended = run_program(f"WandbWriter({bad!r}, {str(tmp_path)!r}, resumed=False)")
    assert "ValueError: use_wandb could not open a run" in ended.stderr and "a/b" in ended.stderr
