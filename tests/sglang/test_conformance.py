"""The engines' conformance suite on SGLang's adapter: with SGLang itself on a CPU where it is installed (`make
test-sglang`), and with the tests' own package elsewhere. On a GPU it does not compute in fp32."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightrft.strategy.sglang_utils.sglang_engine import SGLangEngine
from tests.sglang.engines import IS_REAL, ON_GPU, SLEEP_LEVEL, engine_of
from tests.strategy.engine_conformance import (
    SAMPLED,
    CachingEngineConformance,
    Reference,
    ids_of,
    prompts,
)
from tests.wide_models import HEADS_OF_64, MAX_MODEL_LEN, wide_llama, wide_qwen2

pytestmark = pytest.mark.skipif(ON_GPU, reason="SGLang's kernels for GPUs take no fp32; tests/gpu has its own")
_ENGINES: dict[tuple[type, bool], SGLangEngine] = {}


@pytest.fixture(scope="module", autouse=True)
def engines_end() -> Iterator[None]:
    yield
    for engine in _ENGINES.values():
        engine.close()
    _ENGINES.clear()


def shared_engine(ref: Reference) -> SGLangEngine:
    """The engine of this kind of model: a start takes long, and every test brings the weights again."""
    kind = (type(ref.model), ref.model.config.tie_word_embeddings)
    if kind not in _ENGINES:
        _ENGINES[kind] = engine_of(ref)
    return _ENGINES[kind]


class TestSGLangWithQwen2(CachingEngineConformance):
    """Tied, with biases."""

    sleep_level = SLEEP_LEVEL

    def model(self, **changes):
        return wide_qwen2(**HEADS_OF_64 | changes)

    def build(self, reference):
        engine = shared_engine(reference)
        engine.sleep_level = self.sleep_level
        engine.wake_up()
        return engine

    def test_the_longest_request_that_fits_gets_all_its_tokens(self, engine):
        """SGLang would quietly give fewer."""
        params = replace(SAMPLED, max_new_tokens=4)
        [[output]] = engine.generate(prompts(MAX_MODEL_LEN - 4), params, [[3]])
        assert (len(output.response_ids), output.finish_reason) == (4, "length")

    def test_only_the_given_tokens_end_a_response(self, engine, reference):
        """Not the end token of the tokenizer, 1, nor that of the model."""
        params = replace(SAMPLED, max_new_tokens=60, temperature=2.0)
        outputs = engine.generate(prompts(5), params, [list(range(8))])
        stopped = engine.generate(prompts(5), replace(params, stop_token_ids=(5,)), [list(range(8))])
        assert all(len(ids) == 60 for ids in ids_of(outputs)[0]) and any(1 in ids for ids in ids_of(outputs)[0])
        for [whole, cut] in zip(*ids_of(outputs), *ids_of(stopped), strict=True):
            assert cut == (whole[: whole.index(5) + 1] if 5 in whole else whole)

    def test_log_probs_of_top_k_1_are_given_at_temperature_1_alone(self, engine, reference):
        """NUM-02: SGLang scores what it takes for greedy at temperature 1."""
        params = replace(SAMPLED, top_k=1)
        [[at_1], [at_2]] = [engine.generate(prompts(4), replace(params, temperature=t), [[0]])[0] for t in (1.0, 2.0)]
        assert at_1.log_probs is not None and at_2.log_probs is None
        assert at_1.response_ids == at_2.response_ids

    def test_bytes_on_the_device_are_those_of_the_weights_and_of_the_cache(self, engine, reference):
        weights = sum(parameter.nbytes for parameter in reference.model.parameters())
        engine.wake_up()
        held = engine.device_bytes()
        assert weights <= held["weights"] < 2 * weights and held["kv_cache"] > 0
        engine.sleep()
        left = {None: held, 1: held | {"kv_cache": 0}, 2: held | {"kv_cache": 0, "weights": 0}}
        assert engine.device_bytes() == left[self.sleep_level]


class TestSGLangWithQwen2AtLevel1(TestSGLangWithQwen2):
    __test__ = not IS_REAL
    sleep_level = 1


class TestSGLangWithLlama(TestSGLangWithQwen2):
    """Untied, without biases."""

    __test__ = IS_REAL

    def model(self, **changes):
        return wide_llama(**HEADS_OF_64 | changes)
