"""A teacher behind vLLM's own server: the log-probs and the run of the local teacher."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrft.config import Config, ModelConfig
from lightrft.strategy.utils.devices import free_port
from lightrft.trainer import build_trainer
from lightrft.trainer.remote_teacher import PROTOCOLS, Text, check_remote_teacher, scores, teacher_service
from tests import tiny_models
from tests.distributed.ranks import Ranks
from tests.distributed.runs import make_config, read, save_task
from tests.http_servers import TeacherAnswers, launched
from tests.wide_models import MAX_MODEL_LEN, wide_qwen2

ON_GPU = torch.cuda.is_available()
TOLERANCE = 1e-3 if ON_GPU else 3e-5
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TRITON_F32_DEFAULT": "ieee",
} | ({} if ON_GPU else {"TORCHDYNAMO_DISABLE": "1"})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("teacher"))
    wide_qwen2(eos_token_id=1).save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(teacher: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # As `vllm serve` does, whose script asks for a package of that very name, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", teacher]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--dtype", "float32", "--enforce-eager", *(["--gpu-memory-utilization", "0.1"] if ON_GPU else [])]
    with launched(command, ENVIRONMENT, f"{url}/health", tmp_path_factory.mktemp("server") / "log"):
        yield url


@pytest.mark.timeout(400)
def test_log_probs_are_those_of_the_model_and_not_of_the_cache(teacher, url):
    """The same texts twice: log-probs of a prompt that the prefix cache holds would be missing."""
    answers = TeacherAnswers(AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32))
    samples = tiny_models.random_samples(40, max_prompt=150, max_response=200)
    texts = [Text(sample.input_ids.tolist(), sample.response_start) for sample in samples]
    service = teacher_service(ModelConfig("unused", teacher_url=url))
    with asyncio.Runner() as runner:
        found = [scores(service, PROTOCOLS["openai"], texts, runner) for _ in range(2)]
    for text, *both in zip(texts, *found, strict=True):
        expected = answers.log_probs(text.ids)[text.start - 1 :]
        for values in both:
            assert values == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.timeout(400)
def test_what_the_server_refuses_is_said_in_its_words(url):
    options = ModelConfig("unused", teacher_url=url)
    check_remote_teacher(options, len(tiny_models.CHARACTERS) - 1)
    with pytest.raises(ValueError, match=r"of which 40 is the last.*400 Bad Request.*40 is out of vocabulary"):
        check_remote_teacher(options, 40)


def run(config: Config) -> list[dict[str, Any]]:
    build_trainer(config).fit()
    return read(config, "metrics.jsonl")


@pytest.mark.timeout(400)
def test_a_run_is_that_of_the_local_teacher(teacher, url, tmp_path):
    save_task(tmp_path)
    teachers = {"local": {"teacher_pretrain": teacher}, "server": {"teacher_url": url}}
    ranks = Ranks(world_size=1)
    try:
        local, remote = (
            ranks.run(run, make_config(tmp_path, tmp_path / name, model=model))[0] for name, model in teachers.items()
        )
    finally:
        ranks.close()
    for one, other in zip(local[1:], remote[1:], strict=True):
        for name in ("kl/teacher", "train/policy_loss", "train/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=TOLERANCE, abs=TOLERANCE), name
    assert abs(local[1]["kl/teacher"]) > 0.1
