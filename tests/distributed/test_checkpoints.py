"""Checkpoints of whole runs: a run that was stopped, killed or moved to other ranks goes on as if nothing had been."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.utils import tensorboard
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lightrft.cli.main import main
from lightrft.config import Config
from lightrft.models.collate import micro_batches
from lightrft.strategy.utils.checkpoint_folder import fault
from lightrft.trainer import build_trainer
from lightrft.trainer.setup import check_inputs
from tests import tiny_models
from tests.distributed.resumed_runs import assert_same, history, logged, logged_run, names, run, six_steps
from tests.distributed.runs import read

EVERY_OPTION = {
    "advantage_estimator": "gae",
    "init_kl_coef": 0.05,
    "kl_target": 0.001,
    "kl_horizon": 100,
    # At the stop the actor's optimizer has no state yet, and must not get one by being saved.
    "freezing_actor_steps": 3,
}


@pytest.mark.parametrize(
    "owners",
    [
        {"data": {"max_eval_samples": 5}},
        {"algorithm": EVERY_OPTION, "strategy": {"adam_offload": True}},
        {"algorithm": {"advantage_estimator": "gae"}, "strategy": {"fsdp_cpu_offload": True}},
    ],
    ids=["group_norm", "gae", "cpu_offload"],
)
def test_six_steps_equal_three_a_stop_and_three(two_ranks, task, tmp_path, owners):
    """CKPT-01, CKPT-02, CKPT-03: data order, schedule, optimizer and masters of actor and critic, KL controller."""
    if "data" in owners:
        owners = owners | {"data": owners["data"] | {"eval_data": str(task / "prompts.jsonl")}}
    straight = six_steps(task, tmp_path / "straight", **owners)
    assert two_ranks.run(run, straight) == [0, 0]
    broken = six_steps(task, tmp_path / "broken", **owners, checkpoint={"load_checkpoint": True})
    assert two_ranks.run(run, broken, 3) == [143, 143]
    assert [line["step"] for line in read(broken, "metrics.jsonl")] == [0, 1, 2, 3]
    assert two_ranks.run(run, broken) == [0, 0]
    assert_same(broken, straight)


def test_two_ranks_one_and_two_again_go_on_with_one_another_s_checkpoints(two_ranks, one_rank, task, tmp_path):
    """CKPT-03: shards are dealt anew; rounding differs, as between runs on one rank and on two."""
    straight = six_steps(task, tmp_path / "straight", algorithm={"advantage_estimator": "gae"})
    two_ranks.run(run, straight)
    moved = six_steps(
        task,
        tmp_path / "moved",
        algorithm={"advantage_estimator": "gae"},
        checkpoint={"load_checkpoint": True},
    )
    assert two_ranks.run(run, moved, 2) == [143, 143]
    [(code, log)] = one_rank.run(logged_run, moved, 4, 0)
    assert code == 143
    assert (
        "step_00000002 was saved at WORLD_SIZE=2 and is loaded at 1: all ranks take the random states of rank 0" in log
    )
    assert two_ranks.run(run, moved) == [0, 0]
    assert_same(moved, straight, tolerance=1e-4)


# Which checkpoint is taken, and what is kept


@pytest.fixture(scope="module")
def finished(two_ranks, task, tmp_path_factory) -> Config:
    """A run of six steps with a checkpoint after each second one, which holds a model of its own too."""
    config = six_steps(
        task,
        tmp_path_factory.mktemp("finished"),
        rollout={"n_samples_per_prompt": 4},
        checkpoint={"save_steps": 2, "max_ckpt_num": 3, "save_hf_ckpt": True},
    )
    assert two_ranks.run(run, config) == [0, 0]
    return config


@pytest.fixture
def copied(finished, tmp_path) -> Config:
    """The finished run in a folder of its own, ready to be resumed."""
    shutil.copytree(finished.train.save_path, tmp_path / "run")
    return replace(
        finished,
        train=replace(finished.train, save_path=str(tmp_path / "run")),
        checkpoint=replace(finished.checkpoint, ckpt_path=str(tmp_path / "run" / "ckpt"), load_checkpoint=True),
    )


def test_the_newest_and_the_best_are_kept_and_exports_with_them(two_ranks, task, tmp_path):
    """CKPT-04: the best is that with the highest mean reward of its step; its model goes with it."""
    options = {"save_steps": 1, "max_ckpt_num": 2, "save_hf_ckpt": True}
    config = six_steps(task, tmp_path, checkpoint=options)
    two_ranks.run(run, config)
    rewards = {line["step"]: line["reward/mean"] for line in history(config)[1:]}
    best = max(rewards, key=lambda step: (rewards[step], step))
    assert names(config) == [f"step_{step:08d}" for step in sorted({best, 5, 6})]
    assert len(list(tmp_path.rglob("hf/model.safetensors"))) == len({best, 5, 6})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "complete.json").unlink(), "it is half-written"),
        (lambda folder: (folder / "roles" / "__1_0.distcp").unlink(), "roles/__1_0.distcp is missing"),
    ],
)
def test_a_broken_checkpoint_is_refused_and_written_anew(two_ranks, finished, copied, damage, reason):
    """CKPT-05: the message names both; the steps after the one that was taken come again."""
    folder = Path(str(copied.checkpoint.ckpt_path))
    damage(folder / "step_00000006")
    (code, log), (_, silent) = two_ranks.run(logged_run, copied)
    assert code == 0
    assert f"step_00000006 is not used, since {reason}: the run goes on from step_00000004" in log
    assert "is not used" not in silent
    assert fault(folder / "step_00000006") is None
    assert_same(copied, finished)
    run_folder = Path(copied.train.save_path)
    moved = [json.loads(line)["step"] for line in (run_folder / "metrics.jsonl.1").read_text().splitlines()]
    assert moved == [5, 6]


def test_without_any_complete_checkpoint_the_run_starts(two_ranks, task, finished, tmp_path):
    config = six_steps(task, tmp_path, train={"max_steps": 1}, checkpoint={"load_checkpoint": True})
    broken = tmp_path / "ckpt" / "step_00000002"
    shutil.copytree(Path(str(finished.checkpoint.ckpt_path)) / "step_00000002", broken)
    (broken / "complete.json").unlink()
    (code, log), _ = two_ranks.run(logged_run, config)
    assert code == 0
    assert "step_00000002 is not used, since it is half-written: the run starts at step 0" in log
    assert [line["step"] for line in history(config)] == [0, 1]


def test_a_run_that_starts_moves_an_earlier_one_s_checkpoints_aside(two_ranks, finished, copied):
    """They would count as the newest ones, and push its own out."""
    start = replace(
        copied,
        train=replace(copied.train, max_steps=1),
        checkpoint=replace(copied.checkpoint, load_checkpoint=False),
    )
    two_ranks.run(run, start)
    earlier = [f"{name}.1" for name in names(finished)]
    assert names(start) == ["step_00000001", *earlier]


def test_a_finished_run_has_nothing_left_to_do_and_goes_on_with_more_episodes(two_ranks, finished, copied):
    assert two_ranks.run(run, copied) == [0, 0]
    assert_same(copied, finished)
    longer = replace(copied, train=replace(copied.train, num_episodes=4))
    (code, log), _ = two_ranks.run(logged_run, longer)
    assert code == 0
    assert "going on from" in log and "flags that the checkpoint's run had otherwise: num_episodes: 3 -> 4" in log
    assert [line["step"] for line in history(longer)] == list(range(9))


# What does not fit the checkpoint


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_loaded(copied, tmp_path):
    wider = tiny_models.save_model(tmp_path / "wider", tiny_models.qwen2(intermediate_size=96))
    config = replace(copied, model=replace(copied.model, pretrain=wider))
    with pytest.raises(ValueError) as caught:
        check_inputs(config)
    message = str(caught.value)
    assert (
        "step_00000006 is of other ones: actor/weights/model.model.layers.0.mlp.gate_proj.weight is (64, 32) there "
        in message
    )
    # Three matrices in each of two layers.
    assert "(96, 32) here (and 5 more). Set its --pretrain" in message


def test_a_checkpoint_without_a_critic_is_refused_where_there_is_one(copied):
    config = replace(copied, algorithm=replace(copied.algorithm, advantage_estimator="gae"))
    with pytest.raises(ValueError, match=r"critic/weights/.* is not in it"):
        check_inputs(config)


def test_another_data_set_starts_at_0_and_says_so(two_ranks, task, copied, tmp_path):
    """CKPT-01: the models and the steps go on: 6 are done, and 8 other prompts in three episodes make 6 more."""
    rows = (task / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "others.jsonl").write_text("".join(rows[4:]))
    config = replace(copied, data=replace(copied.data, prompt_data=str(tmp_path / "others.jsonl")))
    (code, log), _ = two_ranks.run(logged_run, config)
    assert code == 0
    assert (
        "the prompts or their order (data, seed, tail_batch) are not those of step_00000006: the data start at 0" in log
    )
    assert [line["step"] for line in history(config)] == list(range(13))
    fresh = six_steps(task, tmp_path / "fresh", data={"prompt_data": str(tmp_path / "others.jsonl")})
    two_ranks.run(run, fresh)
    rows_of = [(r["step"] - 6, r["row"]) for r in read(config, "samples.jsonl") if r["step"] > 6]
    assert rows_of == [(r["step"], r["row"]) for r in read(fresh, "samples.jsonl")]


# A disk that takes no more


def writer_that_waits(make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return make(*arguments, **options | {"flush_secs": 3600})


def run_on_a_full_disk(config: Config, blocked_rank: int) -> None:
    """A run in which one rank cannot write more than a few bytes to a file while a checkpoint of step 4 is saved."""
    # On a slow machine TensorBoard's thread would write in that time, and meet the limit too.
    with mock.patch.object(tensorboard, "SummaryWriter", partial(writer_that_waits, tensorboard.SummaryWriter)):
        trainer = build_trainer(config)
    save = trainer.checkpointer.save

    def blocked(state):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if state.step == 4 and trainer.strategy.rank == blocked_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            save(state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    trainer.checkpointer.save = blocked
    trainer.fit()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_cannot_be_written_is_told_and_the_last_one_lives(two_ranks, task, tmp_path, rank):
    config = six_steps(task, tmp_path, checkpoint={"save_steps": 2})
    (_, log), _ = two_ranks.run(logged, run_on_a_full_disk, config, rank)
    assert "step_00000004 could not be saved, and training goes on" in log
    assert "The last complete one is step_00000002." in log
    assert "OSError: [Errno 27] File too large" in log or "unexpected pos" in log
    assert names(config) == ["step_00000002", "step_00000006"]
    failed = {line["step"]: line.get("checkpoint/failed") for line in read(config, "metrics.jsonl")}
    assert failed == {0: None, 1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 1.0, 6: 1.0}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["checkpoint/failed"] == 1


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_does_not_end_the_run(two_ranks, task, small_disk, tmp_path):
    """The first checkpoint fits; there is no room for a second one beside it."""
    config = six_steps(task, tmp_path / "run", checkpoint={"save_steps": 2, "ckpt_path": str(small_disk)})
    (code, log), _ = two_ranks.run(logged_run, config)
    assert code == 0
    assert log.count("could not be saved, and training goes on (0.00 GiB are free there)") == 2
    assert names(config) == ["step_00000002"]
    assert fault(small_disk / "step_00000002") is None


# Export


def exported_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def run_and_score(config: Config) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The live actor's weights after a run, and its log-probs of a response."""
    trainer = build_trainer(config)
    trainer.fit()
    sample = tiny_models.sample([3, 4], [5, 6, 7])
    actor, strategy = trainer.actor.model, trainer.strategy
    [(micro, _, _)] = micro_batches([sample], [[0]], trainer.experience_maker.layout, strategy.device)
    with torch.no_grad():
        log_probs = actor(micro, 1.0).log_probs
        weights = {name: tensor.clone() for name, tensor in strategy.named_weights(actor, torch.float32)}
    return weights, log_probs


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model whose generation config says more than its configuration, with settings that contradict each other."""
    folder = tmp_path_factory.mktemp("base")
    tiny_models.save_model(folder)
    settings = {"eos_token_id": [1, 5], "do_sample": False, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_on_its_own_and_scores_as_the_live_actor(two_ranks, task, base, tmp_path, tied):
    """CKPT-06: weights equal to the bit; tokenizer, generation config and card are there."""
    if not tied:
        tiny_models.save_model(base, tiny_models.qwen2(tie_word_embeddings=False))
        (base / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    options = {"save_steps": 2, "save_hf_ckpt": True}
    config = six_steps(task, tmp_path / "run", model={"pretrain": str(base)}, checkpoint=options)
    live, log_probs = two_ranks.run(run_and_score, config)[0]
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run" / "ckpt"), str(out)]) == 0
    for folder in (out, tmp_path / "run" / "ckpt" / "step_00000006" / "hf", tmp_path / "run" / "model"):
        weights = exported_weights(folder)
        assert all(torch.equal(weights[name], live[name]) for name in live) and len(weights) == len(live), folder
        assert AutoTokenizer.from_pretrained(folder).decode([4, 5]) == "23"
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, 5]
        assert f"`{base}` after 6 steps" in (folder / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 5, 6, 7]])).logits
    expected = logits.log_softmax(-1)[0, 1:4].gather(-1, torch.tensor([[5], [6], [7]]))[:, 0]
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_dtype_of_an_export_is_chosen(finished, tmp_path, dtype, expected):
    """CKPT-06: bf16 is the rounded fp32 master."""
    source = Path(str(finished.checkpoint.ckpt_path)) / "step_00000004"
    assert main(["export", str(source), str(tmp_path / "out"), "--dtype", dtype]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == expected
    whole = exported_weights(source / "hf")
    assert all(torch.equal(t, whole[name].to(expected)) for name, t in exported_weights(tmp_path / "out").items())


def test_an_export_says_what_it_wrote_and_warns_of_no_accelerator(finished, tmp_path):
    """Saving a model imports DeepSpeed where it is installed, which guesses the accelerator aloud unless it is told."""
    source = Path(str(finished.checkpoint.ckpt_path)) / "step_00000004"
    command = [sys.executable, "-c", "import sys; from lightrft.cli.main import main; main(sys.argv[1:])", "export"]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    arguments = [str(source), str(tmp_path / "out")]
    done = subprocess.run(command + arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == f"{source} -> {tmp_path / 'out'}\n"
    assert "accelerator" not in done.stderr


def test_an_export_of_what_is_no_complete_checkpoint_says_why(copied, tmp_path, capsys):
    folder = Path(str(copied.checkpoint.ckpt_path)) / "step_00000006"
    (folder / "complete.json").unlink()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    for source, output, message in (
        (folder, tmp_path / "out", "a checkpoint must be complete"),
        (tmp_path / "full", tmp_path / "out", "no complete checkpoint is there"),
        (folder.parent, tmp_path / "full", "the output must be a new folder"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["export", str(source), str(output)])
        assert stop.value.code == 2
        assert f"error: {message}" in capsys.readouterr().err
