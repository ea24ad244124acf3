"""The engines' conformance suite on real vLLM, in one process."""

from unittest import mock

import pytest
import torch

from lightrft.strategy.vllm_utils.vllm_engine import VLLMEngine
from tests.strategy.engine_conformance import (
    GREEDY,
    CachingEngineConformance,
    Reference,
    load,
    prompts,
)
from tests.vllm.engines import engine_of
from tests.wide_models import wide_llama, wide_qwen2

ON_GPU = torch.cuda.is_available()
needs_sleep = pytest.mark.skipif(not ON_GPU, reason="vLLM sleeps on GPUs only")
_ENGINES: dict[tuple[type, bool], VLLMEngine] = {}


def shared_engine(ref: Reference) -> VLLMEngine:
    """The engine of this kind of model: a start takes seconds, and every test brings the weights again."""
    kind = (type(ref.model), ref.model.config.tie_word_embeddings)
    if kind not in _ENGINES:
        if ON_GPU and _ENGINES:
            pytest.skip("a process can have one engine that sleeps")
        _ENGINES[kind] = engine_of(ref, sleep_level=2 if ON_GPU else None)
    return _ENGINES[kind]


class TestVLLMWithQwen2(CachingEngineConformance):
    """Tied, with biases. On a GPU a test that does not sleep proves nothing of sleep, so both levels run everything."""

    sleep_level = 2 if ON_GPU else None
    scores_filtered_samples = False
    log_prob_tolerance = 1e-3 if ON_GPU else 1e-4

    def model(self, **changes):
        return wide_qwen2(**changes)

    def build(self, reference):
        engine = shared_engine(reference)
        engine.sleep_level = self.sleep_level
        engine.wake_up()
        return engine

    @needs_sleep
    def test_sleep_gives_back_what_the_engine_held(self, engine):
        engine.generate(prompts(4), GREEDY, [[0]])
        held, free = sum(engine.device_bytes().values()), torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] - free > 0.95 * held > 2**30
        assert engine.device_bytes() == {"weights": 0, "kv_cache": 0}

    def test_a_sync_resets_the_cache_where_requests_ran_since_the_last_one(self, engine, reference):
        engine.generate(prompts(4), GREEDY, [[0]])
        llm = engine.engine.llm
        with mock.patch.object(llm, "reset_prefix_cache", wraps=llm.reset_prefix_cache) as reset:
            load(engine, reference.model, version=2)
            load(engine, reference.model, version=3)
        # Awake, an engine that sleeps falls asleep for new weights, which drops its cache.
        assert reset.call_count == (0 if self.sleep_level else 1)

    def test_bytes_on_the_device_are_those_of_the_weights_and_of_the_cache(self, engine, reference):
        """Buffers and the vocabulary's padding come on top of the weights."""
        weights = sum(parameter.nbytes for parameter in reference.model.parameters())
        engine.wake_up()
        held = engine.device_bytes()
        assert weights <= held["weights"] < 2 * weights and held["kv_cache"] > 0


class TestVLLMWithQwen2AtLevel1(TestVLLMWithQwen2):
    __test__ = ON_GPU
    sleep_level = 1


class TestVLLMWithLlama(TestVLLMWithQwen2):
    """Untied, without biases."""

    def model(self, **changes):
        return wide_llama(**changes)


class TestVLLMWithLlamaAtLevel1(TestVLLMWithLlama):
    __test__ = ON_GPU
    sleep_level = 1
