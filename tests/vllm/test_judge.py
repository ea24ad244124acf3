"""A judge behind vLLM's own server."""

import asyncio
import re
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lightrft.config import Config, DataConfig, ModelConfig, RewardConfig
from lightrft.rewards.records import Grade
from lightrft.rewards.remote import check_reward_servers, remote_sources
from lightrft.strategy.utils.devices import free_port
from tests import tiny_models
from tests.http_servers import launched
from tests.rewards.rows import row
from tests.vllm.test_teacher import ENVIRONMENT, ON_GPU
from tests.wide_models import wide_qwen2

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
ROWS = [row(number, response=f"{number}+{number}") for number in range(6)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("judge")
    wide_qwen2(eos_token_id=1).save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    (folder / "template.jinja").write_text(TEMPLATE)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "judge", "--chat-template", str(folder / "template.jinja")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "32", "--generation-config", "vllm"]
    command += ["--dtype", "float32", "--enforce-eager", *(["--gpu-memory-utilization", "0.1"] if ON_GPU else [])]
    with launched(command, ENVIRONMENT, f"{url}/health", folder / "log"):
        yield url


def graded(url: str, prompt: str, **flags: Any) -> list[Grade]:
    """A random model writes characters; the last digit among them is the score."""
    options = {"judge_model": "judge", "judge_pattern": "([0-9])", "judge_range": (0.0, 9.0)} | flags
    config = Config(
        ModelConfig("unused"),
        DataConfig("unused"),
        reward=RewardConfig(judge_url=url, judge_prompt=prompt, **options),
    )
    check_reward_servers(config)
    (judge,) = remote_sources(config)
    with asyncio.Runner() as runner:
        return judge.grade(ROWS, runner)


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text("{response}")
    return str(path)


def said(url: str, text: str) -> str:
    body = {"model": "judge", "messages": [{"role": "user", "content": text}], "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]["content"]


@pytest.mark.timeout(400)
def test_scores_are_those_that_the_model_writes(url, prompt):
    digits = [re.findall("[0-9]", said(url, sample.response)) for sample in ROWS]
    expected = [int(found[-1]) / 9 if found else None for found in digits]
    assert len({value for value in expected if value is not None}) > 1
    for base in (url, f"{url}/v1"):
        found = graded(base, prompt)
        assert [grade.value for grade in found] == pytest.approx(expected)
        assert [grade.fault is None for grade in found] == [value is not None for value in expected]


@pytest.mark.timeout(400)
def test_a_model_that_the_server_does_not_have_is_said_in_its_words(url, prompt):
    for grade in graded(url, prompt, judge_model="other"):
        assert grade.value is None and grade.fault is not None and grade.fault.kind == "error"
        assert f"{url}/v1/chat/completions answered with 404" in grade.fault.message and "other" in grade.fault.message
