import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from lightrft.cli.doctor import OPTIONAL, judged, main, omp_threads, optional_packages, usable_cores


def doctor(path: Path) -> subprocess.CompletedProcess[str]:
    """The command, with the packages' descriptions in `path` before those that are installed."""
    return subprocess.run(
        [sys.executable, "-m", "lightrft.cli.main", "doctor"],
        cwd=path,
        env={**os.environ, "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def describe(path: Path, name: str, version: str, *requirements: str) -> None:
    """Puts a package's description there, as pip does."""
    folder = path / f"{name}-{version}.dist-info"
    folder.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Requires-Python: >=3.11"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def test_nothing_is_missing_where_the_tests_run_and_each_line_fits_into_80_columns(tmp_path):
    shown = doctor(tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert max(map(len, shown.stdout.splitlines())) <= 80 and "…" not in shown.stdout
    for text in ("python", "torch", "transformers", "OMP_NUM_THREADS", "host memory", "shared memory"):
        assert text in shown.stdout
    assert "A run is on the CPU, with gloo" in shown.stdout
    assert shown.stdout.endswith("Nothing that every run needs is missing.\n")


def test_a_required_package_that_is_missing_or_too_old_is_named_and_exit_code_1(tmp_path):
    describe(tmp_path, "lightrft", "0.1.0", "no-such-package>=2", "torch<4,>=3", 'wandb>=0.1; extra == "wandb"')
    shown = doctor(tmp_path)
    assert shown.returncode == 1
    assert shown.stdout.endswith("Install first, in the range above: no-such-package, torch.\n")
    [missing] = [line.split() for line in shown.stdout.splitlines() if line.startswith("  no-such-package")]
    assert missing == ["no-such-package", "-", "missing", "supported:", ">=2"]


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.10.1", "too old"), ("2.11.0", "OK"), ("2.13.0+cpu", "OK"), ("2.13.1rc1", "OK"), ("2.14.0", "too new")],
)
def test_a_version_is_judged_by_the_range(version, verdict):
    finding = judged("torch", version, SpecifierSet(">=2.11,<2.14"))
    assert (finding.verdict, finding.found) == (verdict, version)
    assert finding.remark.strip() == "supported: >=2.11, <2.14"
    assert finding.prevents_runs == (verdict == "too old")


def test_every_optional_package_names_what_it_is_for_and_prevents_no_run():
    findings = {finding.name: finding for finding in optional_packages()}
    assert list(findings) == ["torch engine", *OPTIONAL]
    for name, (purpose, _) in OPTIONAL.items():
        assert purpose in findings[name].remark and not findings[name].prevents_runs


@pytest.mark.parametrize(
    ("environment", "verdict"),
    [
        ({}, "look"),
        ({"OMP_NUM_THREADS": "1"}, "look"),
        ({"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "PASSIVE"}, "look"),
        ({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}, "OK"),
    ],
)
def test_threads_that_spin_for_the_same_cores_are_advised_against(environment, verdict):
    finding = omp_threads(environment, cores=2)
    assert finding.verdict == verdict
    assert verdict == "OK" or "2 cores" in finding.remark


def test_cores_are_counted_on_systems_that_bind_no_process_to_some(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert usable_cores() == os.cpu_count()


def test_arguments_are_a_usage_error(capsys):
    assert main(["--verbose"]) == 2
    assert capsys.readouterr().err.startswith("usage: lightrft doctor")
