"""Kills and signals at any moment: what was saved completely is there, and the run goes on from it."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from lightrft.config import Config, dump_yaml
from lightrft.models.actor import Actor
from lightrft.models.loading import load_config, load_tokenizer
from lightrft.strategy.roles import TrainedRole
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.utils.checkpoint_folder import PARTIAL, newest_complete
from lightrft.trainer import build_trainer
from lightrft.trainer.checkpointing import Checkpointer, TrainingState, find_resume_point, flags_of
from tests.distributed.ranks import spawn_ranks
from tests.distributed.resumed_runs import USER_CODE, assert_same, run, six_steps
from tests.distributed.runs import BACKENDS, make_config
from tests.distributed.torchrun import torchrun

SEED = 0
SAVE_SECONDS = 0.1
"""About what a save of the tiny model takes."""


def fill(role: TrainedRole, step: int) -> None:
    """Makes the step readable in every weight and in all of the optimizer's state."""
    for parameter in role.model.parameters():
        parameter.data.fill_(step)
        moments = {name: torch.full_like(parameter.data, step) for name in ("exp_avg", "exp_avg_sq")}
        role.optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}


def steps_in(role: TrainedRole) -> set[float]:
    tensors = [parameter.data for parameter in role.model.parameters()]
    tensors += [value for state in role.optimizer.state.values() for value in state.values()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return {value for tensor in local for value in tensor.unique().tolist()}


def state_of(config: Config, step: int) -> TrainingState:
    return TrainingState(
        step, 0, 0.0, 0.0, {}, "", scores={"reward/mean": -step}, before={}, after={}, best={}, flags=flags_of(config)
    )


def save_for_ever(config: Config, connection: Connection) -> None:
    """Loads the newest checkpoint, tells its step and what is in it, and saves one after the other."""
    torch.set_num_threads(1)
    strategy = get_strategy(config)
    strategy.setup_distributed()
    loaded = load_config(config.model.pretrain, "padded")
    role = strategy.prepare_optimizer("actor", strategy.prepare_model(loaded, "causal_lm", Actor, True), 1e-3, 10)
    point = find_resume_point(config, log=True)
    checkpointer = Checkpointer(config, strategy, [role], load_tokenizer(config.model.pretrain), "", point)
    state = checkpointer.load()
    connection.send((0 if state is None else state.step, steps_in(role) if state is not None else set()))
    for step in count(1 if state is None else state.step + 1):
        fill(role, step)
        checkpointer.save(state_of(config, step))
        connection.send(step)


def saved_until_killed(config: Config, seconds: float) -> tuple[int, set[float], int]:
    """Step that a process found, what its tensors held, and the last step it has saved before the kill."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    here, there = context.Pipe()
    process = context.Process(target=save_for_ever, args=(config, there), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(60)
        found, content = here.recv()
        time.sleep(seconds)
    finally:
        process.kill()
        process.join()
    last = found
    while here.poll():
        try:
            last = here.recv()
        except EOFError:
            break
    return found, content, last


@pytest.fixture
def environment(monkeypatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield


@pytest.mark.usefixtures("environment")
def test_a_kill_at_any_of_twenty_moments_leaves_a_checkpoint_to_go_on_from(task, tmp_path):
    """CKPT-05: each process resumes what the one before was killed over, in the middle of a save or a deletion."""
    config = make_config(
        task, tmp_path / "run", checkpoint={"save_steps": 1, "max_ckpt_num": 2, "load_checkpoint": True}
    )
    root = tmp_path / "run" / "checkpoints"
    moments = random.Random(SEED)
    last, num_half_written = 0, 0
    for _ in range(20):
        found, content, saved = saved_until_killed(config, moments.uniform(0, 4) * SAVE_SECONDS)
        # A save may have been complete and not told yet.
        assert found in (last, last + 1)
        assert content == ({float(found)} if found else set())
        last = max(saved, found)
        num_half_written += any(root.glob(f"*{PARTIAL}"))
    assert num_half_written > 0
    newest, _ = newest_complete(root)
    assert newest is not None and newest.name in (f"step_{last:08d}", f"step_{last + 1:08d}")
    # The best, the two newest, and at most one that was to be deleted and one that is half-written.
    assert len(list(root.iterdir())) <= 5


# A run on two ranks


def killed_run(config: Config, folder: Path, seconds: float) -> None:
    """A run whose rank 1 is killed some time after a folder of its checkpoints is there."""
    if os.environ["RANK"] == "1":
        threading.Thread(target=kill_after, args=(folder, seconds), daemon=True).start()
    build_trainer(config).fit()


def kill_after(folder: Path, seconds: float) -> None:
    while not folder.exists():
        time.sleep(0.005)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("steps", [(2,), pytest.param((1, 3, 6), marks=pytest.mark.slow)])
@pytest.mark.parametrize(("backend", "suffix", "seconds"), [("fsdp", "", 0.3), ("zero3", PARTIAL, SAVE_SECONDS)])
def test_a_run_on_two_ranks_that_is_killed_ends_as_an_unbroken_one(
    two_ranks, task, tmp_path, backend, suffix, seconds, steps
):
    """CKPT-05: at random moments of steps and saves, or, with ZeRO-3, of saves alone."""
    moments = random.Random(SEED)
    options = {"save_steps": 1, "load_checkpoint": True}
    # Two steps an episode, and four after the last that a kill waits for.
    flags = {"train": {"num_episodes": (steps[-1] + 4) // 2}, "strategy": BACKENDS[backend]}
    config = six_steps(task, tmp_path / "killed", **flags, checkpoint=options)
    for step in steps:
        folder = Path(str(config.checkpoint.ckpt_path)) / f"step_{step:08d}{suffix}"
        results = spawn_ranks(killed_run, 2, config, folder, moments.uniform(0, seconds))
        assert results[1].returncode == -signal.SIGKILL, results[1].stderr
    assert two_ranks.run(run, config) == [0, 0]
    straight = six_steps(task, tmp_path / "straight", **flags)
    two_ranks.run(run, straight)
    assert_same(config, straight)


# Signals under torchrun


@pytest.fixture
def signalled(task, tmp_path):
    """The end of a training whose torchrun gets signals while step 3 lasts, and its configuration."""

    def start(numbers: list[int], seconds: float):
        (tmp_path / "user_code.py").write_text(USER_CODE)
        config = six_steps(task, tmp_path / "run", checkpoint={"save_steps": 2})
        (tmp_path / "run.yaml").write_text(dump_yaml(config))
        env = {"SIGNALS": " ".join(str(int(number)) for number in numbers), "SECONDS": str(seconds)}
        ended = torchrun(tmp_path / "user_code.py", "--config", str(tmp_path / "run.yaml"), env=env, grace=5.0)
        newest, refused = newest_complete(tmp_path / "run" / "ckpt")
        assert newest is not None and not refused
        return ended, newest.name

    return start


def test_a_signal_to_torchrun_ends_the_run_after_its_step_with_a_checkpoint(signalled):
    ended, newest = signalled([signal.SIGTERM], seconds=1.0)
    assert newest == "step_00000003"
    assert ended.left == [] and ended.returncode != 0
    assert "SIGTERM: the run ends after this step; a second signal ends it now" in ended.output
    assert "step 4/6" not in ended.output and "step 3/6" in ended.output


def test_a_second_signal_ends_at_once_and_the_last_complete_checkpoint_lives(signalled):
    ended, newest = signalled([signal.SIGINT, signal.SIGINT], seconds=60.0)
    assert newest == "step_00000002"
    assert ended.left == [] and ended.returncode != 0
    assert ended.seconds < 40
    assert "SIGINT: the run ends after this step" in ended.output
    assert "ends this process now" in ended.output


@pytest.mark.slow
def test_a_step_that_lasts_longer_than_torchrun_waits_leaves_the_last_checkpoint(signalled):
    """torchrun kills its ranks 30 seconds after it has passed a signal on."""
    ended, newest = signalled([signal.SIGTERM], seconds=120.0)
    assert newest == "step_00000002"
    assert ended.left == [] and ended.returncode != 0
