"""Images, clips and sounds on real vLLM: the Actor scores what it draws, on the same ids and tensors.

On a GPU the engine sleeps, and a process can have one such: tests/gpu/test_media_vllm.py gives each family its own.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch

from lightrft.models.lora import engine_weights
from lightrft.strategy.vllm_utils.vllm_engine import VLLMEngine
from tests.strategy.engine_conformance import Reference
from tests.strategy.media_conformance import GREEDY, Case, MediaConformance, load
from tests.vllm.engines import engine_of

ON_GPU = torch.cuda.is_available()
_STARTED: list[str] = []


class VLLMMedia(MediaConformance):
    tolerance = 1e-3 if ON_GPU else 1e-4

    def build(self, reference: Reference) -> AbstractContextManager[VLLMEngine]:
        """With CUDA graphs where there are such: what lies behind a short step's tokens runs in them too."""
        if ON_GPU and _STARTED:
            pytest.skip(f"a process can have one engine that sleeps, and has one of {_STARTED[0]}")
        _STARTED.append(self.family)
        return nullcontext(engine_of(reference, sleep_level=2 if ON_GPU else None, enforce_eager=not ON_GPU))

    def test_what_the_old_weights_made_of_an_item_is_not_found_by_its_name(self, case: Case) -> None:
        """WGT-04: an item has another name in each call, and in this test the same."""
        params = replace(GREEDY, suppressed_ids=case.suppressed)
        case.engine._inputs.num_prompts = 0
        case.generate(params)
        with torch.no_grad():
            for weight in engine_weights(case.model):
                if case.is_of_tower(weight.name) and weight.tensor.ndim >= 2:
                    weight.tensor.mul_(0.5)
        load(case.engine, case.model, 2)
        case.engine._inputs.num_prompts = 0
        self.assert_scored_alike(case, case.generate(params), params)

    @pytest.mark.skipif(not ON_GPU, reason="vLLM sleeps on GPUs only")
    def test_responses_after_a_deep_sleep_and_a_sync_are_those_of_before(self, case: Case) -> None:
        """WGT-03: of text first, which is where stale sums of images would show."""
        text = case.prompts[1:2]
        before = case.engine.generate(text, GREEDY, [[0]]), case.generate(GREEDY)
        for _ in range(3):
            case.engine.sleep()
            case.engine.wake_up(["weights"])
            load(case.engine, case.model)
            case.engine.wake_up(["kv_cache"])
            assert (case.engine.generate(text, GREEDY, [[0]]), case.generate(GREEDY)) == before

    def test_memory_that_a_deep_sleep_leaves_undefined_is_brought_back(self, case: Case) -> None:
        """WGT-03: nothing sleeps here, so NaN stands for what would be there."""
        scratch = case.engine._scratch
        before = case.generate(GREEDY)
        for tensor in scratch.tensors:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        if self.family == "qwen3_vl":
            # A step with images would write there first.
            with pytest.raises(RuntimeError, match="logits that are NaN"):
                case.engine.generate(case.prompts[1:2], GREEDY, [[0]])
        scratch.restore()
        assert case.generate(GREEDY) == before


class TestQwen2VL(VLLMMedia):
    family = "qwen2_vl"


class TestQwen2_5VL(VLLMMedia):
    family = "qwen2_5_vl"


class TestQwen3VL(VLLMMedia):
    family = "qwen3_vl"


class TestInternVL(VLLMMedia):
    family = "internvl"


class TestQwen2Audio(VLLMMedia):
    family = "qwen2_audio"
