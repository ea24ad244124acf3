"""Reports of whole runs: Weights & Biases, the reward curve, traces."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightrft.config import Config, dump_yaml
from lightrft.trainer import SPMDPPOTrainer, build_trainer
from lightrft.trainer.setup import check_inputs, is_rank_0
from lightrft.utils.metrics import Writers
from tests.distributed.runs import make_config, read
from tests.distributed.torchrun import torchrun
from tests.utils import wandb_file

TRAIN = Path(__file__).parents[2] / "examples" / "addition" / "train.py"


def run(config: Config) -> list[dict]:
    build_trainer(config).fit()
    return read(config, "metrics.jsonl")


def test_two_ranks_offline_without_a_key_make_one_run_with_all_steps(task, tmp_path):
    """CLI-03: no key, no network and no standard input; nothing hangs, and no process is left."""
    config = make_config(task, tmp_path / "runs" / "one", report={"use_wandb": True, "wandb_project": "p"})
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    env = {"WANDB_MODE": "offline", "WANDB_API_KEY": "", "NETRC": str(tmp_path / "netrc")}
    ended = torchrun(TRAIN, "--config", str(tmp_path / "run.yaml"), env=env)
    assert (ended.returncode, ended.left) == (0, []), ended.output
    folder = tmp_path / "runs" / "one"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]
    logged = wandb_file.history(folder)
    assert [line["step"] for line in logged] == [0, 1, 2]
    for line, expected in zip(logged, read(config, "metrics.jsonl"), strict=True):
        assert line == pytest.approx(expected)
    assert wandb_file.config(folder)["rollout_batch_size"] == 4
    assert wandb_file.exit_code(folder) == 0
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1


def test_a_login_that_is_missing_ends_the_run_with_one_line(task, tmp_path):
    config = make_config(task, tmp_path / "run", report={"use_wandb": True})
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    env = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": str(tmp_path / "netrc")}
    ended = torchrun(TRAIN, "--config", str(tmp_path / "run.yaml"), env=env)
    assert ended.returncode != 0 and ended.left == []
    assert ended.seconds < 45
    message = "error: use_wandb needs a login at Weights & Biases: no key is configured."
    assert ended.output.count("error: ") == ended.output.count(message) == 1
    # The only traceback is torchrun's own, after the message.
    assert "lightrft/trainer" not in ended.output[ended.output.index(message) + len(message) :]


def test_chosen_steps_leave_a_trace_of_each_rank_and_the_same_numbers(two_ranks, task, tmp_path):
    config = make_config(task, tmp_path / "traced", report={"profile_steps": "2"})
    traced = two_ranks.run(run, config)[0]
    plain = two_ranks.run(run, make_config(task, tmp_path / "plain"))[0]
    paths = sorted((tmp_path / "traced" / "profile").iterdir())
    assert [path.name for path in paths] == [f"trace_step2_rank{rank}.json.gz" for rank in (0, 1)]
    for path in paths:
        names = {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert {"gloo:all_reduce", "FSDP::all_gather", "aten::embedding"} <= names
        assert {f"phase/{name}" for name in ("generate", "actor", "train", "sync")} <= names
    for metric in ("train/policy_loss", "train/grad_norm", "reward/mean"):
        assert [line.get(metric) for line in traced] == [line.get(metric) for line in plain]


def test_the_reward_curve_is_in_the_run_folder_at_the_end(two_ranks, task, tmp_path):
    two_ranks.run(run, make_config(task, tmp_path, data={"eval_data": str(task / "prompts.jsonl")}))
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


class FullDisk(Writers):
    def write_config(self, yaml_text: str) -> None:
        raise OSError("no space left on device")


def start_on_a_full_disk(config: Config) -> str:
    """The first line of what each rank raises where rank 0 cannot write."""
    inputs = check_inputs(config)
    writer = FullDisk() if is_rank_0() else inputs.writer
    with pytest.raises(RuntimeError, match="no space left on device") as caught:
        SPMDPPOTrainer(config, inputs=replace(inputs, writer=writer))
    inputs.writer.close()
    inputs.strategy.close()
    return str(caught.value).splitlines()[0]


def test_a_configuration_that_cannot_be_written_ends_all_ranks(two_ranks, task, tmp_path):
    messages = two_ranks.run(start_on_a_full_disk, make_config(task, tmp_path))
    assert messages == ["writing the configuration failed on rank 0 of 2."] * 2
