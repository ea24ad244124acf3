"""The check of a data set's media at the start, shared by two ranks."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightrft.config import Config
from lightrft.datasets.media import MediaLoader
from lightrft.datasets.media_inputs import MediaInputs, MediaRequest
from lightrft.datasets.media_shares import by_shares
from lightrft.datasets.media_workers import MediaWorkers
from lightrft.models.loading import load_config, load_tokenizer
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.utils.collectives import Collectives
from lightrft.strategy.utils.devices import free_port
from lightrft.trainer.data_setup import training_prompts
from lightrft.trainer.media_setup import media_loader, shared_check
from lightrft.trainer.setup import check_inputs
from tests import tiny_media
from tests.datasets.media_samples import image
from tests.distributed.ranks import spawn_ranks
from tests.distributed.runs import make_config

NUM_ROWS = 7


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with an image each, of another height, but for row 3, which is text."""
    folder = tmp_path_factory.mktemp("shares")
    tiny_media.save_model(folder / "model", "qwen2_5_vl")
    rows = []
    for i in range(NUM_ROWS):
        image(16 + 8 * i, 24, seed=i).save(folder / f"{i}.png")
        rows.append({"input": f"{i}?", "label": str(i)} | ({} if i == 3 else {"images": [f"{i}.png"]}))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def broken(task, tmp_path) -> Path:
    """The same, with images that cannot be read in rows 2 and 4."""
    folder = tmp_path / "broken"
    shutil.copytree(task, folder)
    for row in (2, 4):
        (folder / f"{row}.png").write_bytes((folder / f"{row}.png").read_bytes()[:100])
    return folder


def config_of(task: Path, **data: Any) -> Config:
    flags = {"apply_chat_template": True, "prompt_max_len": 256, "media_workers": 0} | data
    return make_config(task, task / "run", data=flags)


def outcome_of(function: Callable[[], Any]) -> tuple[str, Any]:
    """`ok` and what it gives, or the name of its error and the message."""
    try:
        return "ok", function()
    except Exception as error:
        return type(error).__name__, str(error)


class Recorder:
    """Keeps what real workers are asked for."""

    def __init__(self, workers: MediaWorkers, before: Callable[[MediaRequest], None] = lambda request: None) -> None:
        self.workers = workers
        self.before = before
        self.asked: list[str] = []

    def submit(self, request: MediaRequest) -> "Future[MediaInputs]":
        self.before(request)
        self.asked += [Path(item).name for item in request.media["image"]]
        return self.workers.submit(request)

    def close(self) -> None:
        self.workers.close()


def prompts_of(config: Config, before: Callable[[MediaRequest], None] = lambda request: None) -> tuple[list, list[str]]:
    """Row and ids of each prompt, and the files that this rank has decoded."""
    loader = media_loader(config, load_config(config.model.pretrain, config.model.packing))
    assert isinstance(loader, MediaLoader)
    loader._workers = recorder = Recorder(loader._workers, before)  # type: ignore[assignment]
    with shared_check(get_strategy(config), loader):
        prompts = training_prompts(config, load_tokenizer(config.model.pretrain), media=loader)
    loader.close()
    return [(example.row, example.prompt_ids) for example in prompts], recorder.asked


def alone(config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[list, list[str]]:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return prompts_of(config)


def test_each_rank_decodes_its_share_and_all_have_every_prompt_in_order(two_ranks, task, monkeypatch):
    """Of the six rows with images rank 0 has the first, third and fifth: rows 0, 2 and 5."""
    config = config_of(task)
    wanted, all_files = alone(config, monkeypatch)
    (first, by_first), (second, by_second) = two_ranks.run(prompts_of, config, timeout=120)
    assert first == second == wanted and [row for row, _ in wanted] == list(range(NUM_ROWS))
    assert by_first == ["0.png", "2.png", "5.png"] and by_second == ["1.png", "4.png", "6.png"]
    assert sorted(by_first + by_second) == all_files


def test_broken_rows_of_either_share_are_left_out_on_both_ranks(two_ranks, broken, monkeypatch):
    """Row 2 is in the share of rank 0, row 4 in that of rank 1."""
    config = config_of(broken, media_errors="skip")
    wanted, _ = alone(config, monkeypatch)
    (first, _), (second, _) = two_ranks.run(prompts_of, config)
    assert first == second == wanted and [row for row, _ in wanted] == [0, 1, 3, 5, 6]


def mistake(config: Config) -> tuple[str, Any]:
    return outcome_of(lambda: check_inputs(config))


def test_broken_rows_stop_both_ranks_with_the_first_of_all_and_the_count(two_ranks, broken):
    """DATA-05: rank 1, too, names row 2, which it has not decoded."""
    first, second = two_ranks.run(mistake, config_of(broken))
    assert first == second and first[0] == "ValueError"
    assert "2 of 7 rows" in first[1] and f"row 2 (line 3): {broken}/2.png: this image cannot be read: " in first[1]


def break_down(request: MediaRequest) -> None:
    if Path(request.media["image"][0]).name == "4.png":
        raise MemoryError(f"no memory for {request.media['image'][0]}")


def failing_share(config: Config) -> tuple[str, Any]:
    return outcome_of(lambda: prompts_of(config, break_down))


def test_what_fails_in_one_share_is_raised_on_both_ranks_with_its_path(two_ranks, task):
    (kind, message), own = two_ranks.run(failing_share, config_of(task))
    assert own == ("MemoryError", f"no memory for {task}/4.png")
    assert kind == "PhaseError" and message.startswith("checking media failed on rank 1 of 2.")
    assert f"MemoryError: no memory for {task}/4.png" in message


def without_file(config: Config, name: str) -> tuple[str, Any]:
    """On rank 1 the flags name a file that is not there."""
    path = config.data.prompt_data if dist.get_rank() == 0 else name
    flags = {name: getattr(config.data, name) for name in ("apply_chat_template", "prompt_max_len", "media_workers")}
    own = make_config(
        Path(config.model.pretrain).parent, Path(config.train.save_path), data=flags | {"prompt_data": path}
    )
    return outcome_of(lambda: prompts_of(own))


def test_a_file_that_one_rank_lacks_ends_the_other_with_its_name(two_ranks, task):
    (kind, message), (other_kind, other) = two_ranks.run(without_file, config_of(task), "/nowhere.jsonl")
    assert (kind, other_kind) == ("ValueError", "ValueError")
    assert "/nowhere.jsonl is no file" in other and message == f"on rank 1: {other}"


def broken_on_one_rank(config: Config) -> tuple[str, Any]:
    """Rank 1 fails before it comes to the media, by what is no mistake of the user's."""

    def check() -> None:
        with shared_check(get_strategy(config), media_loader(config, load_config(config.model.pretrain, "auto"))):
            if dist.get_rank() == 1:
                raise KeyError("ours")
            training_prompts(config, load_tokenizer(config.model.pretrain), media=None)

    return outcome_of(check)


def test_what_is_no_mistake_of_the_users_is_raised_with_its_traceback_elsewhere(two_ranks, task):
    text = config_of(task, image_key="none")
    (kind, message), other = two_ranks.run(broken_on_one_rank, text)
    assert other == ("KeyError", "'ours'")
    assert kind == "PhaseError" and message.startswith("reading prompts failed on rank 1 of 2.")
    assert "Traceback" in message and "KeyError: 'ours'" in message


def shares_of(counts: Sequence[int]) -> tuple[str, Any]:
    collectives = Collectives(torch.device("cpu"))
    items = list(range(counts[collectives.rank]))
    return outcome_of(lambda: by_shares(collectives, items, lambda part: [10 * one for one in part], "counting"))


@pytest.mark.parametrize("count", [0, 1, 2, 999, 2503])
def test_results_are_in_the_order_of_the_items_however_many_exchanges_they_take(two_ranks, count):
    assert two_ranks.run(shares_of, (count, count)) == [("ok", [10 * i for i in range(count)])] * 2


def test_ranks_with_other_numbers_of_prompts_are_told(two_ranks):
    for kind, message in two_ranks.run(shares_of, (5, 4)):
        assert kind == "ValueError" and "counting found 4 of them on rank 1 and 5 on rank 0" in message


def die(config: Config) -> tuple[str, Any]:
    """Rank 1 is killed while it decodes."""

    def kill(request: MediaRequest) -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    return outcome_of(lambda: prompts_of(config, kill))


def test_a_rank_that_is_killed_in_its_share_does_not_keep_the_other_waiting(task):
    """Its limit for waiting, 60 s and 30 more, is longer than the test's."""
    survivor, dead = spawn_ranks(die, 2, config_of(task), timeout=40, init_group=False)
    assert dead.returncode == -signal.SIGKILL
    assert survivor.value is not None and survivor.value[0] in ("RuntimeError", "DistBackendError"), survivor.value


def early_and_late(config: Config, port: int) -> list[int]:
    """Sums of ranks' numbers in an early group and in the run's; rank 0, which serves the store, leaves late."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    strategy = get_strategy(config)
    with strategy.process_groups.early_collectives() as early:
        sums = early.all_reduce_sum([early.rank + 1])
        time.sleep(1.0 if early.rank == 0 else 0.0)
    assert not dist.is_initialized()
    strategy.setup_distributed()
    sums += strategy.collectives.all_reduce_sum([strategy.rank + 1])
    strategy.close()
    return [round(value) for value in sums]


def test_the_runs_group_comes_after_an_early_one_where_a_rank_serves_the_store(task):
    results = spawn_ranks(early_and_late, 2, config_of(task), free_port(), init_group=False)
    assert [result.value for result in results] == [[3, 3]] * 2, results[0].stderr + results[1].stderr
