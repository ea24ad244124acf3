"""The rank processes that the other tests run on."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import ROOT, RankTraceback, spawn_ranks


def _rank_and_environment() -> tuple[int, dict[str, str]]:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    return dist.get_rank(), {name: os.environ[name] for name in names}


def _process_id() -> int:
    return os.getpid()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("told to fail")


def _fail_out_of_step() -> None:
    if dist.get_rank() == 1:
        raise KeyError("told to fail")
    dist.all_reduce(torch.ones(1))


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def _die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    print("still here")
    return "returned"


def test_each_rank_sees_the_environment_of_torchrun(two_ranks):
    results = two_ranks.run(_rank_and_environment)
    for rank, (own_rank, environment) in enumerate(results):
        assert own_rank == rank
        assert environment == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }


def test_an_exception_of_a_rank_is_raised_with_its_traceback_and_the_pair_lives_on(two_ranks):
    before = two_ranks.run(_process_id)
    with pytest.raises(KeyError, match="told to fail") as caught:
        two_ranks.run(_fail_on, 1)
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "on rank 1" in str(caught.value.__cause__) and "in _fail_on" in str(caught.value.__cause__)
    assert two_ranks.run(_process_id) == before


def test_a_pair_that_fails_out_of_step_is_replaced(two_ranks):
    before = two_ranks.run(_process_id)
    with pytest.raises(KeyError, match="told to fail"):
        two_ranks.run(_fail_out_of_step)
    assert not set(two_ranks.run(_process_id)) & set(before)


def test_a_pair_that_hangs_is_replaced(two_ranks):
    before = two_ranks.run(_process_id)
    with pytest.raises(TimeoutError, match=r"_hang_on did not return on ranks \[1\] within 0.5 s"):
        two_ranks.run(_hang_on, 1, timeout=0.5)
    assert not set(two_ranks.run(_process_id)) & set(before)


def test_spawned_ranks_report_how_each_of_them_ended():
    killed, returned = spawn_ranks(_die_on, 2, 0)
    assert (killed.returncode, killed.value) == (-signal.SIGKILL, None)
    assert (returned.returncode, returned.value, returned.stdout) == (0, "returned", "still here\n")


def test_spawned_ranks_that_hang_are_killed_and_named():
    with pytest.raises(TimeoutError, match=r"ranks \[0\] were still there after 0.5 s"):
        spawn_ranks(_hang_on, 1, 0, timeout=0.5)


def test_ranks_end_when_their_parent_is_killed():
    script = (
        "from tests.distributed.ranks import Ranks\n"
        "from tests.distributed.test_ranks import _hang_on, _process_id\n"
        "ranks = Ranks(2)\n"
        "print(*ranks.run(_process_id), flush=True)\n"
        "ranks.run(_hang_on, 0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process_ids = [int(word) for word in parent.stdout.readline().split()]
        time.sleep(0.5)  # By now rank 0 hangs in its call.
        parent.kill()
    assert len(process_ids) == 2
    _wait_for_the_end_of(process_ids)


def _wait_for_the_end_of(process_ids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{process_id}/fd/0") for process_id in process_ids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
