"""One suite for every rollout engine: subclass `EngineConformance`, give `build`, and its tests run on your engine.

The models are tiny and random, with weights large enough that their choices are not ties.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightrft.strategy.engine import EngineState, ManagedEngine, RolloutEngine
from lightrft.types import GenerationOutput, PromptExample, SamplingParams, WeightSpec
from tests import tiny_models
from tests.tiny_models import CHARACTERS, random_model

VOCAB_SIZE = len(CHARACTERS)
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=12)


@dataclass(frozen=True)
class Reference:
    """The model whose weights the engine gets, and the folder that the engine is built from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path


def tiny_qwen2(**changes: object) -> PreTrainedModel:
    return random_model(tiny_models.qwen2(**{"max_position_embeddings": 128, "eos_token_id": None} | changes))


def reference(model: PreTrainedModel, folder: Path) -> Reference:
    model.config.save_pretrained(folder)
    tokenizer = tiny_models.tokenizer()
    tokenizer.save_pretrained(folder)
    return Reference(model, tokenizer, folder)


def prompt(ids: Sequence[int], row: int = 0) -> PromptExample:
    text = "".join(CHARACTERS[i] for i in ids)
    return PromptExample(row=row, prompt=text, prompt_ids=list(ids))


def prompts(*lengths: int) -> list[PromptExample]:
    numbers = random.Random(7)
    return [prompt([numbers.randrange(VOCAB_SIZE) for _ in range(n)], row) for row, n in enumerate(lengths)]


def load(engine: ManagedEngine | RolloutEngine, model: PreTrainedModel, version: int = 1) -> None:
    """A weight sync, as the strategy makes it."""
    weights = dict(model.named_parameters())
    specs = [WeightSpec(name, tuple(w.shape), w.dtype) for name, w in weights.items()]
    begin = engine.begin_weight_update if isinstance(engine, ManagedEngine) else engine.check_weights
    begin(specs)
    for name, weight in weights.items():
        engine.update_weights([(name, weight.detach())])
    engine.finish_weight_update(version)


def full_log_probs(
    model: PreTrainedModel, prompt_ids: list[int], response_ids: list[int], temperature: float
) -> Tensor:
    """Log-probs of the response tokens from one forward without cache or padding, `(L,)`."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt_ids + response_ids])).logits[0, len(prompt_ids) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response_ids)[:, None]).squeeze(-1)


def hf_greedy(model: PreTrainedModel, prompt_ids: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt_ids])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
    )
    return output[0, len(prompt_ids) :].tolist()


def ids_of(outputs: Sequence[Sequence[GenerationOutput]]) -> list[list[list[int]]]:
    return [[output.response_ids for output in group] for group in outputs]


class EngineConformance(ABC):
    sleep_level: int | None = 2
    log_prob_tolerance = 1e-4
    scores_filtered_samples = True
    """Whether the engine gives log-probs where top_p and top_k filter."""

    def model(self, **changes: object) -> PreTrainedModel:
        """A small random model that the engine can run."""
        return tiny_qwen2(**changes)

    @abstractmethod
    def build(self, reference: Reference) -> RolloutEngine:
        """An engine in fp32 for the reference's folder, awake and without weights."""

    @pytest.fixture
    def reference(self, tmp_path: Path) -> Reference:
        return reference(self.model(), tmp_path)

    @pytest.fixture
    def engine(self, reference: Reference) -> ManagedEngine:
        """Synced with the reference's model, version 1."""
        engine = ManagedEngine(self.build(reference), self.sleep_level)
        load(engine, reference.model)
        return engine

    # Generation

    def test_greedy_output_is_that_of_hugging_face(self, engine: ManagedEngine, reference: Reference) -> None:
        batch = prompts(3, 9, 5)
        outputs = engine.generate(batch, GREEDY, [[0], [1], [2]])
        assert ids_of(outputs) == [[hf_greedy(reference.model, p.prompt_ids, 12)] for p in batch]
        assert {output.finish_reason for [output] in outputs} == {"length"}

    @pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
    def test_log_probs_are_those_of_a_full_forward_at_the_sampling_temperature(
        self, engine: ManagedEngine, reference: Reference, temperature: float
    ) -> None:
        """NUM-01, NUM-02, NUM-03: padding, cache and filters change nothing."""
        filters = {"top_p": 0.8, "top_k": 20} if self.scores_filtered_samples else {}
        batch = prompts(2, 7)
        params = replace(SAMPLED, temperature=temperature, **filters)
        for example, group in zip(batch, engine.generate(batch, params, [[1, 2, 3], [4]]), strict=True):
            for output in group:
                expected = full_log_probs(reference.model, example.prompt_ids, output.response_ids, temperature)
                assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=self.log_prob_tolerance)

    @pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_k": 3}])
    def test_filtered_samples_have_log_probs_of_the_whole_vocabulary_or_none(
        self, engine: ManagedEngine, reference: Reference, filters: dict[str, float]
    ) -> None:
        """NUM-02: never those that are normalised over what the filters left."""
        [[output]] = engine.generate(prompts(5), replace(SAMPLED, **filters), [[1]])
        if not self.scores_filtered_samples:
            assert output.log_probs is None
            return
        expected = full_log_probs(reference.model, prompts(5)[0].prompt_ids, output.response_ids, 1.0)
        assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=self.log_prob_tolerance)

    def test_greedy_log_probs_are_at_temperature_1(self, engine: ManagedEngine, reference: Reference) -> None:
        [[output]] = engine.generate(prompts(4), GREEDY, [[0]])
        expected = full_log_probs(reference.model, prompts(4)[0].prompt_ids, output.response_ids, 1.0)
        assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=self.log_prob_tolerance)

    def test_tokens_do_not_depend_on_the_rest_of_the_batch(self, engine: ManagedEngine) -> None:
        """NUM-03, DIST-03: each response alone equals the same response among longer and shorter neighbours."""
        batch, seeds = prompts(1, 12, 5, 30), [[1, 2], [3], [4, 5, 6], [7]]
        together = ids_of(engine.generate(batch, SAMPLED, seeds))
        alone = [
            [ids_of(engine.generate([example], SAMPLED, [[seed]]))[0][0] for seed in keys]
            for example, keys in zip(batch, seeds, strict=True)
        ]
        assert together == alone

    def test_samples_of_a_prompt_differ_and_the_same_seed_repeats(self, engine: ManagedEngine) -> None:
        [first] = ids_of(engine.generate(prompts(4), SAMPLED, [[1, 2, 3, 1]]))
        assert first[0] == first[3]
        assert len({tuple(ids) for ids in first}) == 3
        assert ids_of(engine.generate(prompts(4), SAMPLED, [[1, 2, 3, 1]])) == [first]

    def test_top_k_1_is_greedy(self, engine: ManagedEngine) -> None:
        greedy = ids_of(engine.generate(prompts(4, 6), GREEDY, [[0], [0]]))
        assert ids_of(engine.generate(prompts(4, 6), replace(SAMPLED, top_k=1), [[5], [6]])) == greedy

    def test_a_stop_token_ends_its_response_and_stays_in_it(self, engine: ManagedEngine, reference: Reference) -> None:
        greedy = hf_greedy(reference.model, prompts(4)[0].prompt_ids, 12)
        stop = greedy[5]
        end = greedy.index(stop) + 1
        [[output]] = engine.generate(prompts(4), replace(GREEDY, stop_token_ids=(stop,)), [[0]])
        assert (output.response_ids, output.finish_reason) == (greedy[:end], "stop")
        assert output.log_probs is not None and len(output.log_probs) == end

    def test_a_stop_string_ends_its_response_with_the_token_that_completes_it(
        self, engine: ManagedEngine, reference: Reference
    ) -> None:
        greedy = hf_greedy(reference.model, prompts(4)[0].prompt_ids, 12)
        texts = [CHARACTERS[i] for i in greedy]
        string = "".join(texts[4:7])
        end = next(n for n in range(13) if string in "".join(texts[:n]))
        [[output]] = engine.generate(prompts(4), replace(GREEDY, stop=("never said", string)), [[0]])
        assert (output.response_ids, output.finish_reason) == (greedy[:end], "stop")

    def test_a_response_that_stops_on_the_last_allowed_token_is_not_truncated(
        self, engine: ManagedEngine, reference: Reference
    ) -> None:
        greedy = hf_greedy(reference.model, prompts(4)[0].prompt_ids, 12)
        end = greedy.index(greedy[5]) + 1
        params = replace(GREEDY, max_new_tokens=end, stop_token_ids=(greedy[5],))
        [[output]] = engine.generate(prompts(4), params, [[0]])
        assert (output.response_ids, output.finish_reason) == (greedy[:end], "stop")

    def test_rows_that_finish_early_leave_the_others_unchanged(self, engine: ManagedEngine) -> None:
        batch, seeds = prompts(3, 6, 9, 4), [[i, i + 10, i + 20] for i in range(4)]
        params = replace(SAMPLED, max_new_tokens=24)
        unstopped = ids_of(engine.generate(batch, params, seeds))
        stops = (0, 1, 2, 3)
        stopped = engine.generate(batch, replace(params, stop_token_ids=stops), seeds)
        ends = [
            [next((i + 1 for i, token in enumerate(ids) if token in stops), 24) for ids in group] for group in unstopped
        ]
        assert len({end for group in ends for end in group}) > 3, "the test needs rows that end at different steps"
        assert ids_of(stopped) == [
            [ids[:end] for ids, end in zip(*pair, strict=True)] for pair in zip(unstopped, ends, strict=True)
        ]

    def test_results_come_in_the_order_of_the_prompts(self, engine: ManagedEngine) -> None:
        batch = prompts(20, 2, 11)
        outputs = ids_of(engine.generate(batch, GREEDY, [[0], [0], [0]]))
        reversed_outputs = ids_of(engine.generate(batch[::-1], GREEDY, [[0], [0], [0]]))
        assert outputs == reversed_outputs[::-1]
        assert len({tuple(group[0]) for group in outputs}) == 3

    def test_no_prompts_give_no_outputs(self, engine: ManagedEngine) -> None:
        assert engine.generate([], SAMPLED, []) == []

    # Weights

    def test_a_sync_moves_an_engine_weight_by_as_much_as_the_actor_s(
        self, engine: ManagedEngine, reference: Reference
    ) -> None:
        """WGT-01, WGT-04: +0.5 on a norm, and the same prompt gives what the new weights give."""
        before = engine.generate(prompts(6), GREEDY, [[0]])
        with torch.no_grad():
            reference.model.get_submodule("model.norm").weight += 0.5
        load(engine, reference.model, version=2)
        [[output]] = engine.generate(prompts(6), GREEDY, [[0]])
        assert output.response_ids == hf_greedy(reference.model, prompts(6)[0].prompt_ids, 12)
        expected = full_log_probs(reference.model, prompts(6)[0].prompt_ids, output.response_ids, 1.0)
        assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=self.log_prob_tolerance)
        assert output.log_probs != before[0][0].log_probs

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_head_follows_the_embedding_only_where_they_are_tied(self, tmp_path: Path, tied: bool) -> None:
        """WGT-02: one tensor is sent for a tied model, two for an untied one."""
        ref = reference(self.model(tie_word_embeddings=tied), tmp_path)
        assert ("lm_head.weight" in dict(ref.model.named_parameters())) is not tied
        engine = ManagedEngine(self.build(ref), self.sleep_level)
        load(engine, ref.model)
        with torch.no_grad():
            ref.model.get_input_embeddings().weight += torch.linspace(-1, 1, VOCAB_SIZE)[:, None]
        load(engine, ref.model, version=2)
        [[output]] = engine.generate(prompts(6), GREEDY, [[0]])
        expected = full_log_probs(ref.model, prompts(6)[0].prompt_ids, output.response_ids, 1.0)
        assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=self.log_prob_tolerance)

    def test_a_sync_made_to_skip_one_weight_is_caught_by_name(
        self, engine: ManagedEngine, reference: Reference
    ) -> None:
        """WGT-01."""
        weights = dict(reference.model.named_parameters())
        engine.begin_weight_update([WeightSpec(n, tuple(w.shape), w.dtype) for n, w in weights.items()])
        skipped = "model.layers.1.mlp.up_proj.weight"
        engine.update_weights([(n, w.detach()) for n, w in weights.items() if n != skipped])
        with pytest.raises(RuntimeError, match=rf"no update: {skipped}\.$"):
            engine.finish_weight_update(2)
        with pytest.raises(RuntimeError, match="no valid weights"):
            engine.generate(prompts(3), GREEDY, [[0]])

    def test_weights_that_do_not_match_are_named_before_any_is_sent(
        self, engine: ManagedEngine, reference: Reference
    ) -> None:
        """WGT-01."""
        specs = [WeightSpec(n, tuple(w.shape), w.dtype) for n, w in reference.model.named_parameters()]
        by_name = {spec.name: spec for spec in specs}
        del by_name["model.norm.weight"]
        by_name["model.layers.0.mlp.up_proj.weight"] = replace(specs[0], name="model.layers.0.mlp.up_proj.weight")
        by_name["model.norm.weights"] = WeightSpec("model.norm.weights", (32,), torch.float32)
        with pytest.raises(ValueError) as error:
            engine.begin_weight_update(list(by_name.values()))
        shape = tuple(reference.model.get_submodule("model.layers.0.mlp.up_proj").weight.shape)
        for part in (
            "model.norm.weight is missing",
            "model.norm.weights is unknown",
            f"model.layers.0.mlp.up_proj.weight has shape {specs[0].shape} and should have {shape}",
        ):
            assert part in str(error.value)

    def test_a_weight_that_is_not_the_engine_s_bit_by_bit_is_found_by_name(
        self, engine: ManagedEngine, reference: Reference
    ) -> None:
        """WGT-01. One number of one matrix is another; -0 is not 0."""
        weights = dict(reference.model.named_parameters())
        assert engine.verify_weights([(name, w.detach()) for name, w in weights.items()]) == []
        changed = {name: w.detach().clone() for name, w in weights.items()}
        changed["model.layers.1.self_attn.k_proj.weight"][3, 2] += 1e-3
        changed["model.layers.0.mlp.up_proj.weight"][0, 0] = 0.0
        load(engine, reference.model, version=2)
        engine.update_weights([(name, w) for name, w in changed.items() if "up_proj" in name])
        changed["model.layers.0.mlp.up_proj.weight"][0, 0] = -0.0
        assert sorted(engine.verify_weights(list(changed.items()))) == [
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.1.self_attn.k_proj.weight",
        ]

    def test_outputs_carry_the_version_of_the_weights_that_drew_them(
        self, engine: ManagedEngine, reference: Reference
    ) -> None:
        assert engine.generate(prompts(3), GREEDY, [[0]])[0][0].weight_version == 1
        load(engine, reference.model, version=7)
        assert engine.generate(prompts(3), GREEDY, [[0]])[0][0].weight_version == 7
        assert engine.weight_version == 7

    # Memory

    def test_greedy_output_after_sleep_and_sync_is_that_of_before(
        self, engine: ManagedEngine, reference: Reference
    ) -> None:
        """WGT-03: buffers, such as rotary frequencies, survive too."""
        before = engine.generate(prompts(8, 3), GREEDY, [[0], [0]])
        engine.sleep()
        load(engine, reference.model)
        assert engine.state is (EngineState.AWAKE if self.sleep_level is None else EngineState.WEIGHTS)
        assert engine.generate(prompts(8, 3), GREEDY, [[0], [0]]) == before

    def test_sleep_right_after_a_sync_costs_no_weights(self, engine: ManagedEngine, reference: Reference) -> None:
        """Only the weights are awake then: level 2 leaves them, level 1 moves them."""
        before = engine.generate(prompts(8, 3), GREEDY, [[0], [0]])
        load(engine, reference.model)
        engine.sleep()
        assert engine.generate(prompts(8, 3), GREEDY, [[0], [0]]) == before

    def test_every_rollout_and_evaluation_of_a_run_is_from_the_current_weights(
        self, engine: ManagedEngine, reference: Reference
    ) -> None:
        """WGT-03, WGT-04. Evaluate, roll out, train, evaluate, roll out, train, evaluate, with sleep after each use."""
        batch = prompts(8, 3, 20)
        model = reference.model

        def generate() -> list[list[list[int]]]:
            outputs = ids_of(engine.generate(batch, GREEDY, [[0], [0], [0]]))
            engine.sleep()
            return outputs

        def fresh() -> list[list[list[int]]]:
            return [[hf_greedy(model, example.prompt_ids, 12)] for example in batch]

        engine.register_sync(lambda: load(engine, model, version=9))
        expected = [fresh()]
        assert generate() == generate() == expected[-1]
        for version in (2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.3 * parameter.std() * torch.randn_like(parameter)
            load(engine, model, version)
            expected.append(fresh())
            assert generate() == generate() == expected[-1]
        assert expected[0] != expected[1] != expected[2]

    def test_an_engine_that_dropped_its_weights_does_not_generate(
        self, engine: ManagedEngine, reference: Reference
    ) -> None:
        """WGT-03."""
        before = engine.generate(prompts(8), GREEDY, [[0]])
        engine.sleep()
        if engine.state is not EngineState.DROPPED:
            pytest.skip("this engine keeps its weights asleep")
        with pytest.raises(RuntimeError, match="no valid weights"):
            engine.generate(prompts(8), GREEDY, [[0]])
        engine.register_sync(lambda: load(engine, reference.model))
        assert engine.generate(prompts(8), GREEDY, [[0]]) == before


class CachingEngineConformance(EngineConformance):
    """Of engines with a prefix cache and a context of `MAX_MODEL_LEN` tokens."""

    def test_a_long_prompt_is_not_answered_from_the_old_weights_cache(self, engine, reference):
        """WGT-04. 300 tokens fill blocks of the prefix cache (128 tokens on a CPU, 16 on a GPU)."""
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
