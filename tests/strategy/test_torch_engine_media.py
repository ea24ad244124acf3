"""The torch engine generates from media as the actor scores them."""

from collections.abc import Sequence

import pytest
import torch

from lightrft.models.actor import Actor
from lightrft.models.collate import collate
from lightrft.models.lora import engine_weights
from lightrft.models.multimodal import suppressed_ids
from lightrft.strategy.torch_utils.torch_engine import TorchEngine
from lightrft.trainer.rollouts import make_sample
from lightrft.types import PromptExample, SamplingParams, WeightSpec
from tests import tiny_media_models as tiny
from tests.models.test_multimodal import CLIPS, FAMILIES, LAYOUTS, live, samples_of


def engine_of(folder: str, family: str) -> TorchEngine:
    engine = TorchEngine(
        folder, tokenizer=tiny.tokenizer(), device=torch.device("cpu"), dtype=torch.float32, mem_util=0.5
    )
    weights = [(weight.name, weight.tensor) for weight in engine_weights(live(folder, family, "padded"))]
    engine.check_weights([WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights])
    for pair in weights:
        engine.update_weights([pair])
    engine.finish_weight_update(1)
    return engine


def prompts_of(family: str) -> list[PromptExample]:
    return [
        PromptExample(
            row=i,
            prompt="",
            prompt_ids=sample.example.prompt_ids,
            token_inputs={name: value[: sample.response_start] for name, value in sample.token_inputs.items()},
            item_inputs=sample.item_inputs,
        )
        for i, sample in enumerate(samples_of(family))
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_responses_to_media_equal_the_actors(tmp_path, family):
    folder = tiny.save_model(tmp_path, family)
    engine, prompts = engine_of(folder, family), prompts_of(family)
    suppressed = suppressed_ids(engine.model.config, tiny.tokenizer())
    params = SamplingParams(max_new_tokens=9, temperature=1.3, stop_token_ids=(1,), suppressed_ids=suppressed)
    outputs = engine.generate(prompts, params, [[10 * i + j for j in range(3)] for i in range(len(prompts))])
    samples = [
        make_sample(tiny.tokenizer(), engine.model.config, i, j, prompts[i], output)
        for i, group in enumerate(outputs)
        for j, output in enumerate(group)
    ]
    assert len(samples) == 3 * (6 if family in CLIPS else 4)
    for layout in LAYOUTS:
        actor = Actor(live(folder, family, layout), suppressed_ids=suppressed)
        micro = collate(samples, layout)
        assert micro.rollout_log_probs is not None
        with torch.no_grad():
            torch.testing.assert_close(actor(micro, 1.3).log_probs, micro.rollout_log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_suppressed_ids_are_never_drawn(tmp_path, temperature):
    """A head that wants an image placeholder above all."""
    folder = tiny.save_model(tmp_path, "qwen3_vl")
    engine, prompts = engine_of(folder, "qwen3_vl"), prompts_of("qwen3_vl")[:2]
    image, unused = tiny.IDS["<|image_pad|>"], len(tiny.TOKENS)
    with torch.no_grad():
        engine.model.get_parameter("lm_head.weight")[[image, unused]] *= 1000

    def drawn(suppressed: Sequence[int]) -> set[int]:
        params = SamplingParams(max_new_tokens=20, temperature=temperature, suppressed_ids=tuple(suppressed))
        outputs = engine.generate(prompts, params, [[1, 2], [3, 4]])
        return {i for group in outputs for output in group for i in output.response_ids}

    suppressed = suppressed_ids(engine.model.config, tiny.tokenizer())
    assert {image, unused} <= set(suppressed)
    assert drawn([]) & {image, unused}
    assert not drawn(suppressed) & set(suppressed)
