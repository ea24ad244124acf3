from pathlib import Path

import psutil
import pytest
import torch

from lightrft.strategy.torch_utils.host_memory import cgroup_free_bytes, host_free_bytes
from lightrft.strategy.torch_utils.torch_engine import free_bytes

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def set_limit(folder: Path, names: tuple[str, str, str], limit: object, use: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{use}\n")
    (folder / "memory.stat").write_text(f"anon {use - cache}\n{names[2]} {cache}\n")


@pytest.mark.parametrize("path", ["/", "/docker/of-the-host"])
def test_a_container_of_version_2_has_its_limit_less_its_use(path, tmp_path):
    """100 - 70 = 30; the container may see the path that its group has on the host."""
    set_limit(tmp_path, V2, limit=100, use=70)
    assert cgroup_free_bytes(f"0::{path}\n", tmp_path) == [30]


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory"])
def test_a_container_of_version_1_has_its_limit_less_its_use(controllers, tmp_path):
    """100 - 70 = 30"""
    set_limit(tmp_path / "memory", V1, limit=100, use=70)
    set_limit(tmp_path, V1, limit=1, use=0)
    assert cgroup_free_bytes(f"5:pids:/\n4:{controllers}:/docker/x\n0::/\n", tmp_path) == [30]


@pytest.mark.parametrize(("names", "membership", "mount"), [(V2, "0::/a", "."), (V1, "4:memory:/a", "memory")])
def test_cached_files_count_as_free(names, membership, mount, tmp_path):
    """100 - (95 - 60) = 65"""
    set_limit(tmp_path / mount / "a", names, limit=100, use=95, cache=60)
    assert cgroup_free_bytes(membership, tmp_path) == [65]


def test_limits_of_the_groups_above_hold_too(tmp_path):
    """A batch system limits a job, not the step that the process is in: 100 - 20 = 80, and 50 - 40 = 10 of the job."""
    set_limit(tmp_path / "job/step", V2, limit=100, use=20)
    set_limit(tmp_path / "job", V2, limit=50, use=40)
    assert cgroup_free_bytes("0::/job/step", tmp_path) == [80, 10]


def test_no_limit_and_no_control_groups_leave_it_to_the_machine(tmp_path):
    set_limit(tmp_path, V2, limit="max", use=70)
    assert cgroup_free_bytes("0::/", tmp_path) == []
    assert cgroup_free_bytes("4:memory:/\n0::/", tmp_path / "none") == []


def test_use_above_the_limit_leaves_nothing(tmp_path):
    set_limit(tmp_path, V2, limit=100, use=101)
    assert cgroup_free_bytes("0::/", tmp_path) == [0]


def test_the_ranks_of_a_host_share_what_is_free(monkeypatch):
    assert 0 < host_free_bytes() <= psutil.virtual_memory().total
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    assert free_bytes(torch.device("cpu")) < psutil.virtual_memory().total / 1_000_000
