"""One suite for every engine that takes media: subclass `MediaConformance` for a family of models, and give `build`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrft.models.actor import Actor
from lightrft.models.collate import collate
from lightrft.models.lora import engine_weights
from lightrft.models.multimodal import FAMILIES, suppressed_ids
from lightrft.strategy.engine import ManagedEngine
from lightrft.strategy.torch_utils.torch_engine import TorchEngine
from lightrft.trainer.rollouts import make_sample
from lightrft.types import GenerationOutput, PromptExample, SamplingParams, WeightBucket, WeightSpec
from tests import tiny_media_models as tiny
from tests.media_prompts import media_prompts
from tests.models.test_multimodal import live
from tests.strategy.engine_conformance import Reference, ids_of
from tests.wide_models import save_wide_media

GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)


@dataclass(frozen=True)
class Case:
    """A family's engine, the model whose weights it has, and prompts with 0, 1, 3 and mixed items."""

    family: str
    folder: Path
    engine: Any
    model: PreTrainedModel
    prompts: list[PromptExample]

    @property
    def suppressed(self) -> tuple[int, ...]:
        return suppressed_ids(self.model.config, tiny.tokenizer())

    def is_of_tower(self, name: str) -> bool:
        """Whether a weight is of what reads media, by its name in published folders."""
        begin = "audio_tower." if self.family == "qwen2_audio" else "vis"
        return name.removeprefix("model.").startswith(begin)

    def generate(self, params: SamplingParams, num_samples: int = 1) -> list[list[GenerationOutput]]:
        seeds = [[10 * i + j for j in range(num_samples)] for i in range(len(self.prompts))]
        return self.engine.generate(self.prompts, params, seeds)


class MediaConformance(ABC):
    family: str
    tolerance = 1e-4

    @abstractmethod
    def build(self, reference: Reference) -> AbstractContextManager[Any]:
        """An engine in fp32 for the reference's folder, awake and without weights, until the context ends."""

    def save(self, folder: Path) -> None:
        """The model and its processor."""
        save_wide_media(folder, self.family)

    @pytest.fixture(scope="class")
    @classmethod
    def built(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any, list[PromptExample]]]:
        folder = tmp_path_factory.mktemp(cls.family)
        cls().save(folder)
        model = live(str(folder), cls.family, "padded")
        with cls().build(Reference(model, tiny.tokenizer(), folder)) as engine:
            yield folder, engine, media_prompts(folder, cls.family)

    @pytest.fixture
    def case(self, built: tuple[Path, Any, list[PromptExample]]) -> Case:
        """With fresh weights."""
        folder, engine, prompts = built
        case = Case(self.family, folder, engine, live(str(folder), self.family, "padded"), prompts)
        load(engine, case.model)
        return case

    def assert_scored_alike(
        self, case: Case, outputs: Sequence[Sequence[GenerationOutput]], params: SamplingParams
    ) -> None:
        actors, engines = scored(case, outputs, params)
        torch.testing.assert_close(actors, engines, atol=self.tolerance, rtol=0)

    def test_log_probs_of_every_mix_of_items_equal_the_actors(self, case: Case) -> None:
        """NUM-01, DATA-06, DATA-07: at the sampling temperature, without the ids that are never drawn."""
        params = SamplingParams(9, temperature=1.3, stop_token_ids=(1,), suppressed_ids=case.suppressed)
        outputs = case.generate(params, 3)
        assert len({tuple(output.response_ids) for group in outputs for output in group}) == 3 * len(case.prompts)
        self.assert_scored_alike(case, outputs, params)

    def test_greedy_responses_are_those_of_the_torch_engine(self, case: Case) -> None:
        engine = TorchEngine(
            str(case.folder), tokenizer=tiny.tokenizer(), device=torch.device("cpu"), dtype=torch.float32, mem_util=0.5
        )
        load(engine, case.model)
        params = replace(GREEDY, suppressed_ids=case.suppressed)
        expected = engine.generate(case.prompts, params, [[0] for _ in case.prompts])
        outputs = case.generate(params)
        assert ids_of(outputs) == ids_of(expected)
        assert {output.finish_reason for [output] in outputs} == {"length"}

    def test_a_response_depends_on_its_own_media_and_on_no_neighbours(self, case: Case) -> None:
        """DATA-06: other pixels in one prompt change its log-probs alone."""
        together = case.generate(GREEDY)
        first = case.prompts[0]
        alone = case.engine.generate([first], GREEDY, [[0]])
        assert ids_of(alone) == ids_of(together)[:1]
        name = next(name for name in first.item_inputs if name in ("pixel_values", "input_features"))
        changed = replace(first, item_inputs={**first.item_inputs, name: 1 - first.item_inputs[name]})
        others = case.engine.generate([changed, *case.prompts[1:]], GREEDY, [[0] for _ in case.prompts])
        assert log_probs(others[0][0]) != pytest.approx(log_probs(together[0][0]), abs=1e-2)
        assert ids_of(others)[1:] == ids_of(together)[1:]

    @pytest.mark.parametrize("temperature", [0.0, 2.0])
    def test_ids_that_stand_for_media_or_for_nothing_are_never_drawn(self, case: Case, temperature: float) -> None:
        """A head that wants them above all others; what is left sums to 1, as in the Actor."""
        unwanted = [getattr(case.model.config, name) for name in FAMILIES[case.family].placeholders.values()]
        unwanted.append(len(tiny.TOKENS))
        with torch.no_grad():
            case.model.get_output_embeddings().weight[unwanted] *= 100
        load(case.engine, case.model, 2)
        params = SamplingParams(20, temperature=temperature)
        assert drawn(case.generate(params, 2)) & {*unwanted}
        assert {*unwanted} <= {*case.suppressed}
        params = replace(params, suppressed_ids=case.suppressed)
        outputs = case.generate(params, 2)
        assert not drawn(outputs) & {*case.suppressed}
        self.assert_scored_alike(case, outputs, params)

    def test_as_many_ids_as_one_likes_are_never_drawn(self, case: Case) -> None:
        """All but one: its log-prob is 0."""
        vocab_size = case.model.config.get_text_config().vocab_size
        suppressed = tuple(i for i in range(vocab_size) if i != tiny.IDS["k"])
        outputs = case.generate(SamplingParams(4, suppressed_ids=suppressed))
        assert {tuple(output.response_ids) for [output] in outputs} == {(tiny.IDS["k"],) * 4}
        assert {value for [output] in outputs for value in log_probs(output)} == {0.0}

    def test_an_update_of_the_tower_is_seen_on_the_same_media(self, case: Case) -> None:
        """WGT-04: what the old weights made of an item is dropped."""
        params = replace(GREEDY, suppressed_ids=case.suppressed)
        before = case.generate(params)
        with torch.no_grad():
            for weight in engine_weights(case.model):
                if case.is_of_tower(weight.name) and weight.tensor.ndim >= 2:
                    weight.tensor.mul_(0.5)
        load(case.engine, case.model, 2)
        after = case.generate(params)
        self.assert_scored_alike(case, after, params)
        moved = [
            log_probs(old) != pytest.approx(log_probs(new), abs=1e-3)
            for [old], [new] in zip(before, after, strict=True)
        ]
        assert moved == [bool(prompt.item_inputs) for prompt in case.prompts]

    def test_weights_of_the_tower_and_of_the_rest_are_verified_bit_by_bit(self, case: Case) -> None:
        """WGT-01, WGT-06: each reaches the engine by its published name; one number of one of them is another."""
        engine = ManagedEngine(case.engine, None)
        weights = sent(case.model)
        assert engine.verify_weights(weights) == []
        changed = {name: tensor.detach().clone() for name, tensor in weights}
        of_tower = [name for name in changed if case.is_of_tower(name)]
        key = next(name for name in changed if "layers.1.self_attn.k_proj.weight" in name and name not in of_tower)
        chosen = [of_tower[0], of_tower[-1], key]
        for name in chosen:
            changed[name].view(-1)[-1] += 1e-3
        assert sorted(engine.verify_weights(list(changed.items()))) == sorted(chosen)

    def test_a_tower_weight_without_an_update_is_named(self, case: Case) -> None:
        """WGT-06."""
        weights = sent(case.model)
        skipped = next(name for name, _ in weights if case.is_of_tower(name))
        case.engine.check_weights(specs_of(weights))
        case.engine.update_weights([pair for pair in weights if pair[0] != skipped])
        with pytest.raises(RuntimeError, match=f"no update: {skipped}"):
            case.engine.finish_weight_update(2)

    def test_a_prompt_of_another_length_than_its_media_is_an_error_with_the_row(self, case: Case) -> None:
        broken = case.prompts[2]
        names = FAMILIES[case.family].placeholders.values()
        placeholder = next(i for i in broken.prompt_ids if i in [getattr(case.model.config, name) for name in names])
        short = broken.prompt_ids.copy()
        short.remove(placeholder)
        with pytest.raises(ValueError, match=rf"row 2: .*\b{len(short)} tokens.*\b{len(broken.prompt_ids)} "):
            case.engine.generate([case.prompts[0], replace(broken, prompt_ids=short)], GREEDY, [[0], [0]])
        assert case.generate(GREEDY)

    def test_a_response_stops_at_its_id_and_not_before(self, case: Case) -> None:
        [free] = case.engine.generate(case.prompts[:1], GREEDY, [[0]])
        stop = free[0].response_ids[4]
        end = free[0].response_ids.index(stop) + 1
        [[output]] = case.engine.generate(case.prompts[:1], replace(GREEDY, stop_token_ids=(stop,)), [[0]])
        assert (output.response_ids, output.finish_reason) == (free[0].response_ids[:end], "stop")


def sent(model: PreTrainedModel) -> WeightBucket:
    return [(weight.name, weight.tensor) for weight in engine_weights(model)]


def specs_of(weights: WeightBucket) -> list[WeightSpec]:
    return [WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in weights]


def load(engine: Any, model: PreTrainedModel, version: int = 1) -> None:
    weights = sent(model)
    engine.check_weights(specs_of(weights))
    for pair in weights:
        engine.update_weights([pair])
    engine.finish_weight_update(version)


def scored(case: Case, outputs: Sequence[Sequence[GenerationOutput]], params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The Actor's log-probs of the responses, and the engine's."""
    samples = [
        make_sample(tiny.tokenizer(), case.model.config, i, j, case.prompts[i], output)
        for i, group in enumerate(outputs)
        for j, output in enumerate(group)
    ]
    micro = collate(samples, "padded")
    assert micro.rollout_log_probs is not None
    actor = Actor(case.model, suppressed_ids=params.suppressed_ids)
    with torch.no_grad():
        return actor(micro, params.temperature or 1.0).log_probs, micro.rollout_log_probs


def log_probs(output: GenerationOutput) -> list[float]:
    assert output.log_probs is not None
    return output.log_probs


def drawn(outputs: Sequence[Sequence[GenerationOutput]]) -> set[int]:
    return {i for group in outputs for output in group for i in output.response_ids}
