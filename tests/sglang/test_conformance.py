"""The engines' conformance suite on SGLang's adapter: with SGLang on a GPU, with the tests' own package on a CPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from lightrft.strategy.sglang_utils.sglang_engine import SGLangEngine
from tests.sglang.engines import IS_REAL, MAX_MODEL_LEN, engine_of, wide_llama, wide_qwen2
from tests.strategy.engine_conformance import (
    GREEDY,
    SAMPLED,
    EngineConformance,
    Reference,
    full_log_probs,
    ids_of,
    load,
    prompts,
)

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


class TestSGLangWithQwen2(EngineConformance):
    """Tied, with biases."""

    sleep_level = 2
    log_prob_tolerance = 1e-3 if IS_REAL else 1e-4

    def model(self, **changes):
        return wide_qwen2(**changes)

    def build(self, reference):
        engine = shared_engine(reference)
        engine.sleep_level = self.sleep_level
        engine.wake_up()
        return engine

    def test_a_long_prompt_is_not_answered_from_the_old_weights_cache(self, engine, reference):
        """WGT-04."""
        [example] = batch = prompts(300)
        engine.generate(batch, GREEDY, [[0]])
        with torch.no_grad():
            reference.model.get_submodule("model.layers.0.self_attn.v_proj").weight *= -1
        weights = [(name, weight.detach()) for name, weight in reference.model.named_parameters()]
        engine.update_weights(weights)
        engine.engine._has_values = True
        [[stale]] = engine.generate(batch, GREEDY, [[0]])
        load(engine, reference.model, version=2)
        [[output]] = engine.generate(batch, GREEDY, [[0]])
        expected = full_log_probs(reference.model, example.prompt_ids, output.response_ids, 1.0)
        assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=self.log_prob_tolerance)
        assert stale.log_probs[0] != pytest.approx(output.log_probs[0], abs=1e-3), "the cache was not used"

    def test_a_request_that_does_not_fit_the_engine_is_refused_with_the_numbers(self, engine):
        with pytest.raises(ValueError, match=r"300 \+ 85 tokens, context 384"):
            engine.generate(prompts(4, 300), replace(SAMPLED, max_new_tokens=85), [[0], [0]])

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
        assert engine.device_bytes() == held | {
            "kv_cache": 0,
            "weights": held["weights"] if self.sleep_level == 1 else 0,
        }


class TestSGLangWithQwen2AtLevel1(TestSGLangWithQwen2):
    sleep_level = 1


class TestSGLangWithLlama(TestSGLangWithQwen2):
    """Untied, without biases."""

    __test__ = IS_REAL

    def model(self, **changes):
        return wide_llama(**changes)


class TestSGLangWithLlamaAtLevel1(TestSGLangWithLlama):
    __test__ = IS_REAL
    sleep_level = 1
