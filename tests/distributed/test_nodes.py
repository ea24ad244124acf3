"""Several nodes: a torchrun agent for each, here all on one machine."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightrft.config import Config, dump_yaml
from lightrft.trainer import build_trainer
from tests.distributed.runs import make_config, read
from tests.distributed.torchrun import Ended, torchrun

TRAIN = Path(__file__).parents[2] / "examples" / "addition" / "train.py"
SAME_ON_ANY_RANKS = ("reward/mean", "train/policy_loss", "train/grad_norm", "rollout/response_length")


def train_on_nodes(
    config: Config, folder: Path, num_nodes: int, per_node: int, of_the_last: Sequence[str] = ()
) -> list[Ended]:
    """How each node's agent ended; the last one's command line has further flags."""
    (folder / "run.yaml").write_text(dump_yaml(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run_node(node: int) -> Ended:
        meeting = ("--master_addr=127.0.0.1", f"--master_port={port}")
        sizes = (f"--nnodes={num_nodes}", f"--node_rank={node}", f"--nproc_per_node={per_node}")
        flags = ["--config", str(folder / "run.yaml"), *(of_the_last if node == num_nodes - 1 else ())]
        return torchrun(TRAIN, *flags, timeout=150, launch=(*sizes, *meeting))

    with ThreadPoolExecutor(num_nodes) as pool:
        return list(pool.map(run_node, range(num_nodes)))


def names(folder: Path) -> list[str]:
    """A second writer would have moved files of the first aside."""
    return sorted(path.name for path in folder.iterdir())


def run(config: Config) -> list[dict]:
    build_trainer(config).fit()
    return read(config, "metrics.jsonl")


@pytest.mark.parametrize(("per_node", "tp_size"), [(1, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_two_nodes_give_the_run_of_one_and_one_run_folder(two_ranks, task, tmp_path, per_node, tp_size):
    """Rank 1 of two nodes has LOCAL_RANK 0 as rank 0 has, and writes nothing; groups of two lie inside a node."""
    expected = two_ranks.run(run, make_config(task, tmp_path / "one node"))[0]
    config = make_config(task, tmp_path / "runs" / "nodes", rollout={"engine_tp_size": tp_size})
    first, second = train_on_nodes(config, tmp_path, num_nodes=2, per_node=per_node)
    assert (first.returncode, first.left, second.returncode, second.left) == (0, [], 0, []), first.output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["nodes"]
    assert names(tmp_path / "runs" / "nodes") == names(tmp_path / "one node")
    history = read(config, "metrics.jsonl")
    assert [line["step"] for line in history] == [0, 1, 2]
    for metric in SAME_ON_ANY_RANKS:
        assert history[2][metric] == pytest.approx(expected[2][metric], abs=1e-4), metric
    assert first.output.count("step 2/2: ") == 1
    assert "step 2/2: " not in second.output


@pytest.mark.parametrize(
    ("of_the_last", "message"),
    [
        (
            ("--seed", "7", "--temperature", "0.5"),
            "--temperature is 1.0 on rank 0 and 0.5 on rank 1, --seed is 42 on rank 0 and 7 on rank 1",
        ),
        (("--prompt_data", "OTHER"), "rank 1 and rank 0 differ"),
    ],
)
def test_each_node_says_that_flags_or_data_differ_before_anything_is_written(task, tmp_path, of_the_last, message):
    (tmp_path / "other.jsonl").write_text("".join(reversed((task / "prompts.jsonl").open().readlines())))
    of_the_last = [str(tmp_path / "other.jsonl") if flag == "OTHER" else flag for flag in of_the_last]
    ends = train_on_nodes(make_config(task, tmp_path / "run"), tmp_path, 2, 1, of_the_last)
    output = "".join(ended.output for ended in ends)
    assert [(ended.returncode != 0, ended.left) for ended in ends] == [(True, [])] * 2, output
    for ended, start in zip(ends, ["error: ", "[rank 1] error: "], strict=True):
        [line] = [line for line in ended.output.splitlines() if "every rank must have the same" in line]
        assert line.startswith(start) and message in line
    # torchrun has a traceback of its own.
    assert "/lightrft/trainer/" not in output and not (tmp_path / "run").exists()


def test_a_rollout_group_that_would_span_nodes_is_refused_before_anything_is_loaded(
    task, tmp_path, monkeypatch, capsys
):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = make_config(task, tmp_path / "run", rollout={"engine_tp_size": 4})
    with pytest.raises(SystemExit) as stop:
        build_trainer(config)
    assert stop.value.code == 2
    assert "2 of 4 ranks on this node, engine_tp_size=4. Set --engine_tp_size to 1 or 2." in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
