"""`lightrft serve-rm` with a reward model on a GPU."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightrft.config import RewardConfig
from lightrft.rewards.json_service import JSONService
from lightrft.rewards.records import RewardInput
from lightrft.rewards.remote import RemoteRewardSource
from lightrft.rewards.remote_protocol import body_of
from tests import tiny_models
from tests.http_servers import RewardServer, reward_server
from tests.rewards.rows import row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_ROWS = 200
BATCH_SIZE = RewardConfig().remote_rm_batch_size
ROWS = [row(i, prompt="1+2=" * (1 + i % 40), response=f"{i}+" * (1 + i % 60)) for i in range(NUM_ROWS)]
"""Of some 10 to 400 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = tiny_models.qwen2(**sizes, max_position_embeddings=1024)
    return tiny_models.save_classifier(tmp_path_factory.mktemp("classifier"), config)


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardServer]:
    pytest.importorskip("fastapi")
    logs: Path = tmp_path_factory.mktemp("server")
    with reward_server(logs, "--reward_pretrain", folder, "--max_tokens_per_micro_batch", "8192") as server:
        yield server


def source(url: str) -> RemoteRewardSource:
    return RemoteRewardSource(JSONService([url], max_requests=256), BATCH_SIZE)


def expected_scores(folder: str, rows: list[RewardInput]) -> list[float]:
    """What transformers gives each text alone, in fp32."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval().cuda()
    model.config.pad_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        texts = [tokenizer(one.prompt + one.response, return_tensors="pt").to("cuda") for one in rows]
        return [model(**text).logits[0, 0].item() for text in texts]


def test_scores_are_those_of_transformers(folder, server):
    """In fp32; a GPU may compute matrix products in another order."""
    with asyncio.Runner() as runner:
        found = [grade.value for grade in source(server.url).grade(ROWS, runner)]
    expected = torch.tensor(expected_scores(folder, ROWS))
    assert None not in found
    assert (torch.tensor(found) - expected).abs().max() < 1e-2 * expected.std()


def seconds_of(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def test_200_rows_at_once_are_graded_at_the_servers_own_rate(server):
    """Against an httpx client that reads nothing; both connect first."""
    bodies = [body_of(ROWS[start : start + BATCH_SIZE]) for start in range(0, NUM_ROWS, BATCH_SIZE)]

    context = httpx.create_ssl_context()

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(), verify=context) as client:
            replies = await asyncio.gather(*(client.post(server.url, json=one) for one in bodies))
        assert all(reply.status_code == 200 for reply in replies)

    graded = source(server.url)
    with asyncio.Runner() as runner:
        runner.run(ask())
        own = min(seconds_of(lambda: runner.run(ask())) for _ in range(3))
        ours = min(seconds_of(lambda: graded.grade(ROWS, runner)) for _ in range(3))
    print(f"{NUM_ROWS / ours:.0f} rows/s, the server's own rate {NUM_ROWS / own:.0f}")
    assert own / ours >= 0.9
