"""Weights from a rank to a shard, over a socket and a staging buffer, on a small model with loaders like SGLang's."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.strategy.sglang_utils import mapped_file
from lightrft.strategy.sglang_utils.channel import ShardChannel, layouts, staging_size
from lightrft.strategy.sglang_utils.shard import CheckOneToOne, Load, Measure, Request, Shard, Verify, serve
from tests.strategy.test_weight_loading import SPECS, WEIGHTS, DeafModel, FusedModel

CPU = torch.device("cpu")
BUCKET = list(WEIGHTS.items())
SMALLEST = staging_size(max(spec.num_bytes for spec in SPECS), 0)


@pytest.fixture(autouse=True)
def memory_travels_by_its_name() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def served(model: FusedModel, folder: Path, staging_bytes: int = SMALLEST) -> tuple[ShardChannel, threading.Thread]:
    """A rank's end, open, and the thread that stands for the scheduler."""
    channel = ShardChannel(folder / "shard", CPU, staging_bytes)
    scheduler = threading.Thread(target=serve, args=(model, [(channel.address, torch.empty(0))]))
    scheduler.start()
    assert channel.accept(10.0)
    return channel, scheduler


@pytest.mark.parametrize("staging_bytes", [SMALLEST, 4 * SMALLEST])
def test_weights_arrive_and_those_that_differ_are_named(tmp_path: Path, staging_bytes: int) -> None:
    """WGT-01, whether the staging buffer holds one of them or all."""
    model = FusedModel()
    channel, scheduler = served(model, tmp_path, staging_bytes)
    channel.load(BUCKET)
    channel.finish_loads()
    assert model.qk.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]] and model.norm.tolist() == [1, 0]
    assert channel.verify(BUCKET) == []
    model.qk[3, 0] += 2.0**-20
    model.norm[0] = 5.0
    assert channel.verify(BUCKET) == ["k", "norm"]
    channel.hang_up()
    scheduler.join(10)
    assert not scheduler.is_alive()


def test_the_sender_may_change_its_weights_once_they_are_given(tmp_path: Path) -> None:
    model = FusedModel()
    channel, scheduler = served(model, tmp_path)
    weight = torch.ones(2, 2)
    channel.load([("q", weight)])
    weight.zero_()
    channel.load([("k", weight)])
    channel.finish_loads()
    assert model.qk.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    channel.hang_up()
    scheduler.join(10)


def test_weights_of_several_buckets_are_loaded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The staging buffer has three lines, a weight takes one: q, k and norm at once, then q alone, and k, norm, q."""
    loaded: list[list[str]] = []
    answer = Shard.answer

    def note(shard: Shard, request: Request) -> Any:
        if isinstance(request, Load | Verify):
            loaded.append([weight.spec.name for weight in request.weights])
        return answer(shard, request)

    monkeypatch.setattr(Shard, "answer", note)
    channel, scheduler = served(FusedModel(), tmp_path, 3 * SMALLEST)
    q, k, norm = ((name, WEIGHTS[name]) for name in ("q", "k", "norm"))
    for bucket in ([q], [k, norm], [q]):
        channel.load(bucket)
    assert loaded == [["q", "k", "norm"]]
    assert channel.verify([k, norm, q]) == []
    assert loaded[1:] == [["q"], ["k", "norm", "q"]]
    channel.load([q])
    # The round is given up.
    assert channel.drop_waiting() == ["q"]
    channel.finish_loads()
    channel.hang_up()
    scheduler.join(10)
    assert len(loaded) == 3


def test_an_error_of_the_loaders_is_the_rank_s_and_the_scheduler_lives_on(tmp_path: Path) -> None:
    """SGLang's own would end it."""
    model = FusedModel()
    channel, scheduler = served(model, tmp_path)
    with pytest.raises(RuntimeError, match=r"could not take weights:(.|\n)*KeyError: 'v'"):
        channel.load([("v", torch.ones(2))])
        channel.finish_loads()
    channel.load(BUCKET)
    assert channel.verify(BUCKET) == []
    channel.hang_up()
    scheduler.join(10)


def test_a_model_of_other_weights_is_refused_by_name(tmp_path: Path) -> None:
    """WGT-01."""
    channel, scheduler = served(FusedModel(), tmp_path)
    channel.check_sharing()
    channel.ask(CheckOneToOne(SPECS))
    # 4 x 2, 4 x 2 and 2 numbers of 4 bytes.
    assert channel.ask(Measure()) == 72
    channel.hang_up()
    scheduler.join(10)
    (tmp_path / "other").mkdir()
    channel, scheduler = served(DeafModel(), tmp_path / "other")
    with pytest.raises(NotImplementedError, match=r"SGLang's model must have the weights.*k reaches no parameter"):
        channel.ask(CheckOneToOne(SPECS))
    channel.hang_up()
    scheduler.join(10)


def test_a_file_that_the_scheduler_cannot_open_is_told_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any media come, which would end it."""
    channel, scheduler = served(FusedModel(), tmp_path)
    channel.check_files(tmp_path)
    monkeypatch.setattr(mapped_file.os, "getpid", lambda: 2**22 + 1)
    with pytest.raises(RuntimeError, match=r"must be able to open the rank's files(.|\n)*No such file(.|\n)*hidepid"):
        channel.check_files(tmp_path)
    channel.load(BUCKET)
    assert channel.verify(BUCKET) == []
    channel.hang_up()
    scheduler.join(10)


def test_a_round_after_a_round_calls_again(tmp_path: Path) -> None:
    model = FusedModel()
    channel, scheduler = served(model, tmp_path)
    channel.hang_up()
    assert not channel.is_open
    scheduler.join(10)
    scheduler = threading.Thread(target=serve, args=(model, [(channel.address, torch.empty(0))]))
    scheduler.start()
    assert channel.accept(10.0)
    channel.load(BUCKET)
    assert channel.verify(BUCKET) == []
    channel.hang_up()
    scheduler.join(10)


def test_a_scheduler_may_be_waited_for_again(tmp_path: Path) -> None:
    channel = ShardChannel(tmp_path / "shard", CPU, SMALLEST)
    assert not channel.accept(0.05) and not channel.is_open
    scheduler = threading.Thread(target=serve, args=(FusedModel(), [(channel.address, torch.empty(0))]))
    scheduler.start()
    assert channel.accept(10.0) and channel.is_open and channel.accept(0.0)
    channel.hang_up()
    scheduler.join(10)


def test_a_staging_buffer_is_a_quarter_of_a_bucket_or_the_largest_weight() -> None:
    """MEM-04. 300 bytes take two lines of 256."""
    assert staging_size(300, 4096) == 1024
    assert staging_size(300, 1024) == 512


def test_weights_lie_in_lines_and_in_runs_that_fit() -> None:
    """Of 512 bytes: 256 + 256, then 260 alone, then 4."""
    sizes = {"a": 256, "b": 1, "c": 260, "d": 4}
    bucket = [(name, torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items()]
    runs = [[(weight.spec.name, weight.offset) for weight in run] for run in layouts(bucket, 512)]
    assert runs == [[("a", 0), ("b", 256)], [("c", 0)], [("d", 0)]]


def test_the_first_run_lies_behind_what_is_there() -> None:
    bucket = [(name, torch.zeros(256, dtype=torch.uint8)) for name in "ab"]

    def runs(start: int) -> list[list[tuple[str, int]]]:
        return [[(weight.spec.name, weight.offset) for weight in run] for run in layouts(bucket, 512, start)]

    assert runs(256) == [[("a", 256)], [("b", 0)]]
    assert runs(512) == [[], [("a", 0), ("b", 256)]]
