"""The watch ends a job of which a rank is missing, and names it."""

import os
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from lightrft.strategy.utils.collectives import Collectives
from lightrft.strategy.utils.watch import DESYNC_EXIT_CODE, DesyncWatch, start_watch
from tests.distributed.ranks import RankResult, spawn_ranks

TIMEOUT_SECONDS = 2.0


def _watched() -> tuple[Collectives, DesyncWatch]:
    collectives = Collectives(torch.device("cpu"))
    watch = start_watch(collectives, TIMEOUT_SECONDS, os.environ["MASTER_ADDR"])
    collectives.barrier()
    return collectives, watch


def _skip_a_collective_and_sleep(lazy_rank: int) -> None:
    collectives, _ = _watched()
    if collectives.rank != lazy_rank:
        collectives.all_reduce(torch.ones(1))
    time.sleep(600)


def _skip_a_collective_and_go_on() -> None:
    collectives, _ = _watched()
    if collectives.rank == 0:
        collectives.all_reduce(torch.ones(1))
    with collectives.site("generate"):
        time.sleep(600)


def _end_rank_0_early() -> None:
    collectives, watch = _watched()
    if collectives.rank == 0:
        watch.stop()
        return dist.destroy_process_group()  # Left alone, gloo's threads may abort the process at its end.
    with collectives.site("export"):
        time.sleep(600)


def _kill_rank_0_under_a_collective() -> None:
    collectives, _ = _watched()
    if collectives.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    collectives.all_reduce(torch.ones(1))


def _kill_rank_0_under_a_site() -> None:
    collectives, _ = _watched()
    if collectives.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with collectives.site("generate"):
        time.sleep(600)


def _freeze_rank_0() -> None:
    collectives, _ = _watched()
    if collectives.rank == 0:
        # Someone must end the frozen process, or the test would wait for it.
        subprocess.Popen(["sh", "-c", f"sleep {2 * TIMEOUT_SECONDS}; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    with collectives.site("generate"):
        time.sleep(600)


def _work_alone_for_long() -> float:
    """Both ranks work outside of sites for longer than the timeout; rank 1 then waits for a fifth of it."""
    collectives, watch = _watched()
    time.sleep((1.4 if collectives.rank == 0 else 1.2) * TIMEOUT_SECONDS)
    began = time.monotonic()
    collectives.barrier()
    watch.stop()
    return time.monotonic() - began


def _outlive_rank_0() -> str:
    """Rank 1 goes on after rank 0 has ended as it should."""
    collectives, watch = _watched()
    if collectives.rank == 1:
        time.sleep(TIMEOUT_SECONDS)
    watch.stop()
    return "done"


@pytest.fixture(scope="module", params=[0, 1])
def skipped(request: pytest.FixtureRequest) -> tuple[int, list[RankResult]]:
    """The rank that skipped a collective, and how both ranks ended."""
    return request.param, spawn_ranks(_skip_a_collective_and_sleep, 2, request.param, timeout=20)


def test_a_rank_that_skips_a_collective_ends_the_job_on_all_ranks_and_is_named(skipped):
    lazy_rank, results = skipped
    for result in results:
        assert result.returncode == DESYNC_EXIT_CODE
        error = result.stderr[result.stderr.index("ERROR") :]
        assert f"rank {1 - lazy_rank} waiting for" in error
        assert "in all_reduce(sum) at distributed/test_watch.py:" in error
        assert f": rank {lazy_rank} missing\n" in error
        assert "in _skip_a_collective_and_sleep" in error  # The stack of the main thread.


def test_half_way_to_the_timeout_one_warning_names_the_missing_rank(skipped):
    lazy_rank, results = skipped
    lines = [line for result in results for line in result.stderr.splitlines()]
    (warning,) = [line for line in lines if "missing" in line and "ERROR" not in line]
    assert warning.startswith(f"rank {1 - lazy_rank} waiting for 1.")
    assert warning.endswith(f"rank {lazy_rank} missing")


def test_a_rank_that_goes_on_to_another_site_is_named_with_it():
    for result in spawn_ranks(_skip_a_collective_and_go_on, 2, timeout=20):
        assert result.returncode == DESYNC_EXIT_CODE
        assert "rank 0 in all_reduce(sum) at distributed/test_watch.py:" in result.stderr
        assert "rank 1 in generate at distributed/test_watch.py:" in result.stderr


def test_a_rank_0_that_has_ended_is_named():
    ended, other = spawn_ranks(_end_rank_0_early, 2, timeout=20)
    assert ended.returncode == 0
    assert other.returncode == DESYNC_EXIT_CODE
    assert "rank 0 missing" in other.stderr
    assert "rank 0 ended; last: barrier at distributed/test_watch.py:" in other.stderr


@pytest.mark.parametrize("body", [_kill_rank_0_under_a_collective, _kill_rank_0_under_a_site])
def test_a_killed_rank_0_is_named_although_it_holds_the_store(body):
    killed, other = spawn_ranks(body, 2, timeout=20)
    assert killed.returncode == -signal.SIGKILL
    assert other.returncode != 0
    assert "rank 0 is gone" in other.stderr


def test_a_frozen_rank_0_is_named_although_its_connections_live():
    _, other = spawn_ranks(_freeze_rank_0, 2, timeout=20)
    assert other.returncode == DESYNC_EXIT_CODE
    assert "rank 0 missing" in other.stderr
    assert "rank 0 without a sign of life since" in other.stderr


def test_long_work_outside_of_collectives_is_no_desync():
    results = spawn_ranks(_work_alone_for_long, 2, timeout=20)
    assert [result.returncode for result in results] == [0, 0]
    assert "missing" not in results[0].stderr + results[1].stderr


def test_a_rank_may_outlive_rank_0_in_peace():
    results = spawn_ranks(_outlive_rank_0, 2, timeout=20)
    assert [result.value for result in results] == ["done", "done"]
    assert [result.stderr for result in results] == ["", ""]


def test_a_world_of_one_is_watched_too():
    (result,) = spawn_ranks(_skip_a_collective_and_go_on, 1, timeout=20)
    assert result.returncode == DESYNC_EXIT_CODE
    assert "in generate at distributed/test_watch.py:" in result.stderr
    assert "all ranks are there, but it does not end" in result.stderr
