"""A teacher behind SGLang's own server, beside a rank that trains; vLLM's is in tests/vllm."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config import ModelConfig
from lightrft.strategy.utils.devices import free_port
from lightrft.trainer.remote_teacher import PROTOCOLS, Text, check_remote_teacher, scores, teacher_service
from tests import tiny_models
from tests.http_servers import TeacherAnswers, launched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    folder = tmp_path_factory.mktemp("teacher")
    return tiny_models.save_model(folder, tiny_models.qwen2(**sizes, max_position_embeddings=1024), seed=1)


@pytest.fixture(scope="module")
def url(teacher: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("sglang")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", teacher, "--port", str(port)]
    command += ["--dtype", "bfloat16", "--mem-fraction-static", "0.2", "--disable-cuda-graph"]
    log: Path = tmp_path_factory.mktemp("server") / "log"
    with launched(command, {"HF_HUB_OFFLINE": "1"}, f"{url}/health_generate", log):
        yield url


def test_log_probs_of_sglangs_server_are_those_of_the_model(teacher: str, url: str):
    """In bf16, to what bf16 gives; the same texts twice, the second time with prompts in its cache."""
    options = ModelConfig("unused", teacher_url=url, teacher_api="sglang")
    last_id = len(tiny_models.CHARACTERS) - 1
    check_remote_teacher(options, last_id)
    answers = TeacherAnswers(AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32))
    samples = tiny_models.random_samples(40, max_prompt=150, max_response=200)
    samples += [tiny_models.sample([3], [last_id, 4, last_id])]
    texts = [Text(sample.input_ids.tolist(), sample.response_start) for sample in samples]
    with asyncio.Runner() as runner:
        found = [scores(teacher_service(options), PROTOCOLS["sglang"], texts, runner) for _ in range(2)]
    for both in found:
        expected = [value for text in texts for value in answers.log_probs(text.ids)[text.start - 1 :]]
        differences = torch.tensor([value for values in both for value in values]) - torch.tensor(expected)
        assert differences.abs().mean() < 0.05
