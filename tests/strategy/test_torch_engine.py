import math
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightrft.strategy.torch_utils import torch_engine
from lightrft.strategy.torch_utils.decoding import StopCondition, decode
from lightrft.strategy.torch_utils.torch_engine import TorchEngine, cache_bytes_per_token, plan_chunks
from lightrft.strategy.utils.collectives import Collectives, PhaseError
from lightrft.types import SamplingParams
from tests.distributed.ranks import Ranks
from tests.strategy.engine_conformance import (
    GREEDY,
    SAMPLED,
    EngineConformance,
    Reference,
    full_log_probs,
    hf_greedy,
    ids_of,
    load,
    prompts,
    reference,
    tiny_qwen2,
)
from tests.tiny_models import gpt2, random_model, tokenizer


def torch_engine_of(ref: Reference, dtype: torch.dtype = torch.float32) -> TorchEngine:
    return TorchEngine(str(ref.folder), tokenizer=ref.tokenizer, device=torch.device("cpu"), dtype=dtype, mem_util=0.5)


@pytest.fixture
def qwen2(tmp_path: Path) -> Reference:
    return reference(tiny_qwen2(), tmp_path)


@pytest.fixture
def engine(qwen2: Reference) -> TorchEngine:
    engine = torch_engine_of(qwen2)
    load(engine, qwen2.model)
    return engine


class TestTorchEngine(EngineConformance):
    def build(self, reference: Reference) -> TorchEngine:
        return torch_engine_of(reference)


def test_weights_are_compared_by_their_bits(engine: TorchEngine, qwen2: Reference) -> None:
    """NaN equals itself, 0 and -0 are not the same, and what the engine would round is rounded first."""
    norm = torch.full((32,), float("nan"))
    norm[0] = 0.0
    name = "model.norm.weight"
    engine.update_weights([(name, norm)])
    assert engine.verify_weights([(name, norm), (name, norm.double())]) == []
    norm[0] = -0.0
    assert engine.verify_weights([(name, norm), ("model.nowhere", norm)]) == [name, "model.nowhere"]


def test_padding_changes_nothing_on_a_model_with_absolute_positions(tmp_path: Path) -> None:
    """NUM-03: a padded prompt of GPT-2 starts at position 0."""
    ref = reference(random_model(gpt2(eos_token_id=None)), tmp_path)
    engine = torch_engine_of(ref)
    load(engine, ref.model)
    batch = prompts(3, 8)
    greedy = engine.generate(batch, GREEDY, [[0], [0]])
    assert ids_of(greedy) == [[hf_greedy(ref.model, p.prompt_ids, 12)] for p in batch]
    for example, group in zip(batch, engine.generate(batch, SAMPLED, [[1, 2], [3, 4]]), strict=True):
        for output in group:
            expected = full_log_probs(ref.model, example.prompt_ids, output.response_ids, 1.0)
            assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=1e-5)


def test_a_cold_or_hot_first_token_is_scored_at_the_temperature_of_the_others(
    engine: TorchEngine, qwen2: Reference
) -> None:
    """At 0.001 every sample begins as greedy decoding does; at a million, 64 samples begin in many ways."""
    example, keys = prompts(3)[0], list(range(64))
    [cold] = engine.generate([example], replace(SAMPLED, first_token_temperature=1e-3), [keys])
    [hot] = engine.generate([example], replace(SAMPLED, first_token_temperature=1e6), [keys])
    first = hf_greedy(qwen2.model, example.prompt_ids, 1)
    assert {output.response_ids[0] for output in cold} == set(first)
    assert len({output.response_ids[0] for output in hot}) > len(keys) / 4
    for output in (cold[0], hot[0]):
        expected = full_log_probs(qwen2.model, example.prompt_ids, output.response_ids, SAMPLED.temperature)
        assert torch.tensor(output.log_probs) == pytest.approx(expected, abs=1e-5)


def test_generation_raises_no_warning(engine: TorchEngine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(prompts(3, 5), SAMPLED, [[1, 2], [3]])


def test_finished_rows_leave_the_batch_once_they_are_half_of_it(engine: TorchEngine, qwen2: Reference) -> None:
    """Four rows that end at steps 1, 2, 4 and 5: after the 2 prompts, forwards of 4 rows, then (2 of 4 done) 2 and 2,
    then (1 of 2 done) of 1."""
    batch_sizes = []
    handle = engine.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: batch_sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    ends = iter([[True, False, False, False], [True, False, False], [False, False], [True, False], [True]])
    decode(engine.model, prompts(2, 1), SAMPLED, [[1, 2], [3, 4]], ScriptedStop(ends))
    handle.remove()
    assert batch_sizes == [2, 4, 2, 2, 1]


class ScriptedStop(StopCondition):
    """Answers from a script, in the order in which rows are asked."""

    def __init__(self, answers) -> None:
        super().__init__(SAMPLED, tokenizer())
        self._answers = (answer for step in answers for answer in step)

    def __call__(self, response_ids) -> bool:
        return next(self._answers)


# Weights


def test_a_sync_casts_to_the_engine_s_dtype_and_leaves_the_actor_s_tensor(qwen2: Reference) -> None:
    """WGT-08: bf16 has 8 significant bits, so 1.2345678 becomes 158/128 = 1.234375."""
    engine = torch_engine_of(qwen2, torch.bfloat16)
    weight = qwen2.model.get_submodule("model.norm").weight
    with torch.no_grad():
        weight.fill_(1.2345678)
    load(engine, qwen2.model)
    assert engine.model.get_submodule("model.norm").weight.unique().tolist() == [1.234375]
    assert engine.model.get_submodule("model.norm").weight.dtype == torch.bfloat16
    assert weight.unique().item() == pytest.approx(1.2345678)


@pytest.mark.parametrize("name, shape", [("model.norm.bias", (32,)), ("model.norm.weight", (1,))])
def test_a_bucket_with_a_weight_that_was_not_announced_is_refused_by_name(
    engine: TorchEngine, name: str, shape: tuple[int, ...]
) -> None:
    """WGT-01. A shape that copy_ would broadcast is refused too."""
    with pytest.raises(ValueError, match=name):
        engine.update_weights([(name, torch.zeros(shape))])


def test_buffers_are_those_of_the_hugging_face_model(engine: TorchEngine, qwen2: Reference) -> None:
    assert dict(engine.model.named_buffers()).keys() == dict(qwen2.model.named_buffers()).keys()
    for name, buffer in qwen2.model.named_buffers():
        assert torch.equal(engine.model.get_buffer(name), buffer), name


# Memory


def test_sleep_frees_every_weight_and_keeps_the_buffers(engine: TorchEngine, qwen2: Reference) -> None:
    def held() -> int:
        return sum(p.untyped_storage().nbytes() for p in engine.model.parameters())

    assert held() == sum(p.nbytes for p in qwen2.model.parameters())
    engine.sleep()
    assert held() == 0
    assert torch.equal(
        engine.model.get_buffer("model.rotary_emb.inv_freq"), qwen2.model.get_buffer("model.rotary_emb.inv_freq")
    )
    with pytest.raises(RuntimeError, match=r"wake_up\(\['weights'\]\)"):
        engine.update_weights([("model.norm.weight", torch.zeros(32))])
    engine.wake_up(["kv_cache"])
    assert held() == 0
    engine.wake_up(["weights"])
    assert held() == sum(p.nbytes for p in qwen2.model.parameters())


def test_woken_weights_without_a_sync_are_not_generated_from(engine: TorchEngine) -> None:
    """WGT-03, below ManagedEngine."""
    engine.sleep()
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate(prompts(3), GREEDY, [[0]])
    engine.wake_up()
    with pytest.raises(RuntimeError, match="no weights"):
        engine.generate(prompts(3), GREEDY, [[0]])


def test_chunks_hold_prompts_of_like_length_within_the_budget() -> None:
    """A row takes its prompt's length + 10. Lengths 1, 2, 4, 30, two samples each, budget 60:
    2 x 11 = 22, 4 x 12 = 48, 6 x 14 = 84 > 60, so {1, 2} and {4}; with the longest 4 x 40 > 60, and alone it is 80."""
    assert plan_chunks([4, 30, 1, 2], [2, 2, 2, 2], lambda length: length + 10, 60) == [[2, 3], [0], [1]]


def test_prompts_without_samples_are_in_no_chunk() -> None:
    assert plan_chunks([4, 3, 1], [1, 0, 1], lambda length: 1, 10) == [[2, 0]]


def test_chunks_do_not_change_the_tokens(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, seeds = prompts(3, 12, 7), [[1, 2], [3, 4], [5]]
    together = ids_of(engine.generate(batch, SAMPLED, seeds))
    monkeypatch.setattr(torch_engine, "free_bytes", lambda device: 0)
    assert len(engine._chunks(batch, SAMPLED, seeds)) == 3
    assert ids_of(engine.generate(batch, SAMPLED, seeds)) == together


def test_cache_bytes_count_keys_and_values_of_all_layers(engine: TorchEngine) -> None:
    """2 layers x (key + value) x 2 key-value heads x 8 numbers x 4 bytes = 256."""
    assert cache_bytes_per_token(engine.model) == 256


# Stop strings


def test_a_stop_string_is_found_across_tokens_but_not_before_its_last_token() -> None:
    stops = StopCondition(SamplingParams(max_new_tokens=1, stop=("ab c", "zz")), tokenizer())
    ids = tokenizer().encode("12ab c")
    assert [stops(ids[: n + 1]) for n in range(len(ids))] == [False] * 5 + [True]


# Rollout groups


def _generate_in_a_group(folder: str, poisoned_rank: int | None) -> tuple[list[list[list[int]]], int]:
    """Ids of all prompts, and how many prompts this rank ran itself."""
    own_folder = Path(folder) / str(dist.get_rank())  # Each rank writes what it reads.
    ref = reference(tiny_qwen2(), own_folder)
    engine = TorchEngine(
        str(own_folder),
        tokenizer=ref.tokenizer,
        device=torch.device("cpu"),
        dtype=torch.float32,
        mem_util=0.5,
        collectives=Collectives(torch.device("cpu")),
    )
    if dist.get_rank() == poisoned_rank:
        ref.model.get_input_embeddings().weight.data.fill_(math.nan)
    load(engine, ref.model)
    num_prompts = []
    engine.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: num_prompts.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    outputs = engine.generate(prompts(3, 8, 5), SAMPLED, [[1, 2], [3], [4]])
    return ids_of(outputs), num_prompts[1]


def test_ranks_of_a_group_share_the_prompts_and_all_return_all(
    two_ranks: Ranks, tmp_path: Path, engine: TorchEngine
) -> None:
    """Three prompts: rank 0 takes two, rank 1 one."""
    [first, second] = two_ranks.run(_generate_in_a_group, str(tmp_path), None)
    alone = ids_of(engine.generate(prompts(3, 8, 5), SAMPLED, [[1, 2], [3], [4]]))
    assert first[0] == second[0] == alone
    assert (first[1], second[1]) == (2, 1)


def test_all_ranks_raise_where_one_cannot_generate(two_ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(
        PhaseError, match=r"(?s)generation failed on rank 1 of 2.*logits that are NaN, at row 2"
    ) as info:
        two_ranks.run(_generate_in_a_group, str(tmp_path), 1)
    assert any("rank" in note and "raised as well" in note for note in info.value.__notes__)
