"""Ranks that fail, hang or die under torchrun: everything ends soon, the cause is told, and no process is left."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightrft.config import RewardConfig, dump_yaml
from lightrft.rewards.functions import RewardFunction
from lightrft.rewards.recipes import plan_rewards
from lightrft.strategy.strategy_base import GROUP_TIMEOUT_GRACE_SECONDS
from lightrft.strategy.utils.collectives import PhaseError
from lightrft.trainer.reward_engine import RewardComputationEngine
from tests import tiny_models
from tests.distributed.ranks import spawn_ranks
from tests.distributed.runs import fsdp, make_config, read
from tests.distributed.torchrun import Ended, torchrun

USER_CODE = """
import os, pathlib, signal, time
from concurrent.futures import ThreadPoolExecutor

from torch.distributed.elastic.multiprocessing.errors import record
from lightrft.config import parse_config
from lightrft.trainer import build_trainer

calls = 0
pool = ThreadPoolExecutor()


def score(responses, labels):
    global calls
    calls += 1
    if os.environ["HOW"] == "raise":
        pool.submit(time.sleep, 600)
    if calls == 2 and os.environ["RANK"] == "1":
        fail(os.environ["HOW"])
    return [float(label in response) for response, label in zip(responses, labels)]


def fail(how):
    if how in ("raise", "hang", "kill"):
        pathlib.Path(os.environ["FAILED"]).touch()
    if how == "raise":
        raise RuntimeError("the grader broke")
    if how == "hang":
        time.sleep(999)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


@record
def main():
    trainer = build_trainer(parse_config())
    ppo_train = trainer.ppo_train

    def broken(step, means):
        if step == 2 and os.environ["RANK"] == "1" and os.environ["HOW"] == "raise in training":
            pathlib.Path(os.environ["FAILED"]).touch()
            raise RuntimeError("the training broke")
        return ppo_train(step, means)

    trainer.ppo_train = broken
    trainer.fit()


if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Failure:
    """How a training ended that fails on rank 1 in its second step."""

    command: Ended
    seconds: float
    """From the failure to the end."""
    steps: list[int]
    """What metrics.jsonl holds."""


@pytest.fixture(scope="module")
def failures(task, tmp_path_factory) -> Iterator[Callable[[str], Failure]]:
    """The end of a training by how it failed. They wait a lot, so two run at a time."""
    ways = ("raise", "hang", "raise in training", "kill")
    with ThreadPoolExecutor(2) as pool:
        futures = {how: pool.submit(fail, how, task, tmp_path_factory.mktemp("failure")) for how in ways}
        yield lambda how: futures[how].result()


def fail(how: str, task: Path, folder: Path) -> Failure:
    script = folder / "user_code.py"
    script.write_text(USER_CODE)
    config = make_config(
        task,
        folder / "run",
        train={"max_steps": 3},
        reward={"reward_fn": f"{script}:score"},
        strategy={"dist_timeout_seconds": 8.0},
    )
    (folder / "run.yaml").write_text(dump_yaml(config))
    env = {"HOW": how, "FAILED": str(folder / "failed")}
    command = torchrun(script, "--config", str(folder / "run.yaml"), env=env, terminal=how == "raise in training")
    seconds = command.ended - (folder / "failed").stat().st_mtime
    return Failure(command, seconds, [line["step"] for line in read(config, "metrics.jsonl")])


def line_of(text: str) -> int:
    """Number of the line of the user's code that holds `text`."""
    (number,) = [number for number, line in enumerate(USER_CODE.splitlines(), start=1) if text in line]
    return number


@pytest.mark.parametrize("how", ["raise", "hang", "raise in training", "kill"])
def test_a_failure_on_one_rank_ends_everything_within_45_seconds(failures, how):
    failure = failures(how)
    assert failure.command.returncode != 0
    assert failure.command.left == []
    assert failure.seconds < 45
    assert failure.steps == [0, 1]


def test_a_reward_function_that_raises_is_told_by_all_ranks_although_its_threads_hang(failures):
    output = failures("raise").command.output
    assert output.count("PhaseError: rewards failed on rank 1 of 2.") >= 2
    for rank in (0, 1):  # Rank 0 tells it as well: there a person looks.
        assert f'user_code.py", line {line_of("the grader broke")}, in fail\n[rank{rank}]: ' in output
        assert f"\n[rank{rank}]: RuntimeError: the grader broke\n" in output
    assert "is ended now. Threads left: " in output and "ThreadPoolExecutor" in output


def test_training_code_that_raises_leaves_its_traceback_on_a_usable_terminal(failures):
    output = failures("raise in training").command.output
    assert "\n[rank1]: RuntimeError: the training broke\n" in output
    # What comes after the panel's last move of the cursor upwards stays on the screen.
    screen = output[output.rindex("\x1b[1A") :]
    summary = screen[screen.index("user_code.py FAILED") :]
    assert f'user_code.py", line {line_of("the training broke")}, in broken\n' in summary
    assert "RuntimeError: the training broke\n" in summary
    hidden, shown = (output.rfind(f"\x1b[?25{letter}") for letter in "lh")
    assert shown > hidden > 0


def test_a_reward_function_that_hangs_is_named_with_its_rank_at_the_timeout(failures):
    failure = failures("hang")
    assert failure.seconds > 8
    assert re.search(
        r"ERROR on rank 0, which ends here: rank 0 waiting for \d+\.\d s \(the timeout is 8 s\) "
        r"in rewards at trainer/reward_engine.py:\d+ \(#\d+\): rank 1 missing\n",
        failure.command.output,
    )
    of_rank_1 = failure.command.output[failure.command.output.index("ERROR on rank 1, which ends here: ") :]
    assert f'user_code.py", line {line_of("time.sleep(999)")} in fail\n' in of_rank_1


def test_a_killed_rank_is_named_in_the_end(failures):
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9 .*SIGKILL", failures("kill").command.output)


def leave_on_rank_1() -> str:
    def score(response: str) -> float:
        if os.environ["RANK"] == "1":
            sys.exit()
        return 1.0

    with fsdp() as strategy:
        plan = plan_rewards(RewardConfig(), own=RewardFunction("score", score))
        engine = RewardComputationEngine(strategy.config, strategy, plan)
        engine.submit([tiny_models.sample([3], [4])])
        with pytest.raises(PhaseError) as caught:
            engine.result()
    return str(caught.value)


def test_a_reward_function_that_calls_exit_fails_on_all_ranks(two_ranks):
    for message in two_ranks.run(leave_on_rank_1):
        assert message.startswith("rewards failed on rank 1 of 2.")
        assert "the reward function ended its thread by SystemExit()" in message


def group_timeouts() -> list[float]:
    """Seconds that each process group of this rank waits."""
    with fsdp(rollout={"engine_tp_size": 2}, strategy={"dist_timeout_seconds": 123.0}) as strategy:
        groups = dist.distributed_c10d._world.pg_map
        assert {strategy.tp_group, strategy.dp_group, strategy.mesh.get_group()} <= groups.keys()
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        return [backend.options._timeout.total_seconds() for backend in backends]


def test_every_process_group_has_the_users_timeout():
    """DIST-07: the watch ends a run at the user's timeout and can say why, so groups wait a little longer."""
    for result in spawn_ranks(group_timeouts, 2, init_group=False):
        # The default group, the rollout group of both ranks, and this rank's own data-parallel group.
        assert len(result.value) >= 3
        assert set(result.value) == {123.0 + GROUP_TIMEOUT_GRACE_SECONDS}


def groups_left() -> int:
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    with fsdp(rollout={"engine_tp_size": 2}) as strategy:
        assert {strategy.tp_group, strategy.dp_group} <= groups.keys()
    return len(groups) - before


def test_a_run_in_the_callers_process_group_leaves_none_of_its_own(two_ranks):
    """Each would keep threads: a hundred after some thirty runs in a process."""
    assert two_ranks.run(groups_left) == [0, 0]
