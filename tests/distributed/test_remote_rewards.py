"""Whole runs on two ranks whose rewards come from servers."""

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrft.config import Config, dump_yaml
from lightrft.trainer import build_trainer
from tests import tiny_models
from tests.distributed.runs import make_config, read
from tests.distributed.torchrun import Ended, torchrun
from tests.http_servers import Answer, Request, Server, ok, reward_server, serving

TRAIN = Path(__file__).parents[2] / "examples" / "addition" / "train.py"


def run(config: Config) -> None:
    build_trainer(config).fit()


def metrics(config: Config) -> list[dict[str, Any]]:
    """Of each step."""
    return [line for line in read(config, "metrics.jsonl") if line["step"] > 0]


def remote(url: str, **reward: Any) -> dict[str, Any]:
    return {"reward_fn": None, "remote_rm_url": url, **reward}


def rewards(config: Config) -> list[tuple[Any, ...]]:
    return [(r["step"], r["group"], r["index"], r["response"], r["reward"]) for r in read(config, "samples.jsonl")]


def contains(request: Request) -> Answer:
    pairs = zip(request.body["responses"], request.body["labels"], strict=True)
    return ok({"rewards": [float(label in response) for response, label in pairs]})


def test_a_function_behind_serve_rm_gives_the_run_that_it_gives_here(two_ranks, task, tmp_path):
    here = make_config(task, tmp_path / "here")
    two_ranks.run(run, here)
    with reward_server(tmp_path, "--reward_fn", "contains_answer") as server:
        there = make_config(task, tmp_path / "there", reward=remote(f"{server.url},{server.url}"))
        two_ranks.run(run, there)
    assert rewards(there) == rewards(here)
    for name in ("reward/mean", "reward/std", "reward/accuracy", "train/grad_norm"):
        assert [line[name] for line in metrics(there)] == [line[name] for line in metrics(here)], name


def test_a_reward_model_behind_serve_rm_scores_as_transformers_does(two_ranks, task, tmp_path):
    folder = tiny_models.save_classifier(tmp_path / "classifier", seed=3)
    with reward_server(tmp_path, "--reward_pretrain", folder) as server:
        config = make_config(task, tmp_path / "run", reward=remote(server.url))
        two_ranks.run(run, config)
    samples = read(config, "samples.jsonl")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.config.pad_token_id = None
    with torch.no_grad():
        expected = [
            model(**tokenizer(sample["prompt"] + sample["response"], return_tensors="pt")).logits[0, 0].item()
            for sample in samples
        ]
    assert len({sample["reward"] for sample in samples}) > 5
    assert [sample["reward"] for sample in samples] == pytest.approx(expected, abs=1e-5)


def test_a_judge_and_a_function_are_added_up(two_ranks, task, tmp_path):
    """The judge gives 4 of 0 to 10 to each response, so rewards are 0.4 and 1.4."""
    reply = ok({"choices": [{"message": {"role": "assistant", "content": "Score: 4"}}]})
    with serving(lambda request: reply) as server:
        options = {"judge_url": server.url, "judge_model": "m"}
        config = make_config(task, tmp_path / "run", reward=options)
        two_ranks.run(run, config)
    assert {round(sample["reward"], 6) for sample in read(config, "samples.jsonl")} == {0.4, 1.4}
    assert all(line["reward/judge"] == pytest.approx(0.4) for line in metrics(config))


# A server that dies


@dataclass(frozen=True)
class Death:
    """How a run of two steps ended, one of whose servers was gone after the first."""

    url: str
    command: Ended
    config: Config


@contextmanager
def dying() -> Iterator[Server]:
    """A server that is gone when it has answered the two requests of a step, one of each rank."""
    with ExitStack() as life:
        server = life.enter_context(serving(contains))

        def end() -> None:
            while len(server.requests) < 2:
                time.sleep(0.01)
            life.close()

        threading.Thread(target=end, daemon=True).start()
        yield server


def die(task: Path, folder: Path, errors: str) -> Death:
    with dying() as server:
        config = make_config(task, folder / "run", reward=remote(server.url, reward_errors=errors))
        (folder / "run.yaml").write_text(dump_yaml(config))
        return Death(server.url, torchrun(TRAIN, "--config", str(folder / "run.yaml"), timeout=200), config)


@pytest.fixture(scope="module")
def deaths(task, tmp_path_factory) -> Iterator[Callable[[str], Death]]:
    """They wait a lot, so they run at the same time."""
    with ThreadPoolExecutor(2) as pool:
        futures = {
            errors: pool.submit(die, task, tmp_path_factory.mktemp(errors), errors) for errors in ("stop", "exclude")
        }
        yield lambda errors: futures[errors].result()


def test_a_server_that_dies_ends_both_ranks_with_its_url_where_errors_stop(deaths):
    """RWD-06"""
    death = deaths("stop")
    assert death.command.returncode != 0 and death.command.left == []
    output = death.command.output
    assert output.count("PhaseError: rewards failed on ranks 0-1 of 2.") >= 2
    for rank in (0, 1):
        said = f"{re.escape(death.url)} could not be reached: .* This was try 5 of 5"
        told = rf"\[rank{rank}\]: row \d+, remote_rm: {said}"
        assert re.search(told, output), output
    assert [line["step"] for line in metrics(death.config)] == [1]


def test_a_server_that_dies_leaves_its_rows_out_where_errors_exclude(deaths):
    """RWD-06, RWD-07: no row gets a number that nobody gave."""
    death = deaths("exclude")
    assert death.command.returncode == 0, death.command.output
    first, second = metrics(death.config)
    assert (first["reward/excluded"], second["reward/excluded"], second["reward/failed"]) == (0, 1, 1)
    samples = read(death.config, "samples.jsonl")
    assert all((sample["reward"] is None) == (sample["step"] == 2) for sample in samples) and len(samples) == 32
    assert f"{death.url} could not be reached" in death.command.output
    assert all(math.isfinite(value) for value in second.values())


def test_the_other_server_takes_over_from_one_that_dies(two_ranks, task, tmp_path):
    with dying() as server, serving(contains) as other:
        config = make_config(task, tmp_path / "run", reward=remote(f"{server.url},{other.url}", reward_errors="stop"))
        two_ranks.run(run, config)
        assert len(other.requests) > 0
    assert [line["reward/excluded"] for line in metrics(config)] == [0, 0]
