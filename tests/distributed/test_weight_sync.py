"""The engine generates from the actor's current weights, all of them, or not at all."""

from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightrft.models.actor import Actor
from lightrft.models.collate import collate
from lightrft.models.loading import load_config
from lightrft.models.weights import persistent_tensors
from lightrft.strategy.engine import EngineState, ManagedEngine
from lightrft.strategy.roles import decoder_layers
from lightrft.strategy.utils import broadcast_utils
from lightrft.strategy.utils.prefetch import gathered_ahead
from lightrft.types import Experience, GenerationOutput, PromptExample, SamplingParams
from tests import tiny_models
from tests.distributed.runs import fsdp
from tests.tiny_models import sample


def synced(strategy, folder):
    actor = strategy.prepare_model(load_config(folder, "auto"), "causal_lm", Actor, trainable=True)
    strategy.create_engine(tiny_models.tokenizer())
    strategy.update_engine_weights(actor)
    return actor


def engine_weights(strategy):
    return dict(persistent_tensors(strategy.engine.engine.model))


def engine_differences(strategy, actor, dtype=torch.float32):
    """Names of engine weights that differ from the actor's in any bit."""
    held = engine_weights(strategy)
    sent = {name: tensor.clone() for name, tensor in strategy.named_weights(actor, dtype)}
    assert held.keys() == sent.keys()
    return [name for name in sent if not torch.equal(held[name], sent[name])]


def prompt(row, ids):
    return PromptExample(row=row, prompt="", prompt_ids=ids)


def generate(strategy, prompts, n=1, **params):
    sampling = SamplingParams(**{"max_new_tokens": 5, "stop_token_ids": (1,)} | params)
    seeds = [[100 * p.row + j for j in range(n)] for p in prompts]
    return strategy.gather_and_generate(prompts, sampling, seeds)


def train_and_sync(folder, tied):
    with fsdp(folder) as strategy, torch.no_grad():
        actor = synced(strategy, folder)
        at_start = engine_differences(strategy, actor)
        name = "model.embed_tokens.weight"
        before = engine_weights(strategy)[name].clone()
        dict(actor.model.named_parameters())[name].add_(0.5)
        stale = engine_differences(strategy, actor)
        strategy.update_engine_weights(actor)
        moved = engine_weights(strategy)[name] - before
        torch.testing.assert_close(moved, torch.full_like(moved, 0.5))
        [[output]] = generate(strategy, [prompt(0, [5, 6, 7])])
        one = sample([5, 6, 7], output.response_ids)
        log_probs = actor(collate([one], "packed"), 1.0).log_probs
        torch.testing.assert_close(torch.tensor(output.log_probs), log_probs, atol=1e-4, rtol=0)
        return at_start, stale, engine_differences(strategy, actor), "lm_head.weight" in engine_weights(strategy)


@pytest.mark.parametrize("tied", [True, False])
def test_after_each_sync_the_engine_equals_the_actor_to_the_bit(two_ranks, tmp_path, tied):
    """WGT-01, WGT-02: also when the embedding of a tied model moved by 0.5; an untied one sends its head too."""
    folder = tiny_models.save_model(tmp_path, tiny_models.qwen2(tie_word_embeddings=tied))
    for at_start, stale, after, has_head in two_ranks.run(train_and_sync, folder, tied):
        assert at_start == after == []
        assert stale == ["model.embed_tokens.weight"]
        assert has_head is not tied


def sync_without_one_weight(folder, left_out, announced):
    with fsdp(folder) as strategy, torch.no_grad():
        actor = synced(strategy, folder)
        specs, buckets = strategy.weight_specs, strategy.weight_buckets
        strategy.weight_buckets = lambda *a: ([pair for pair in b if pair[0] != left_out] for b in list(buckets(*a)))
        if not announced:
            strategy.weight_specs = lambda *a: [spec for spec in specs(*a) if spec.name != left_out]
        with pytest.raises(RuntimeError, match=left_out) as caught:
            strategy.update_engine_weights(actor)
        with pytest.raises(RuntimeError, match="no valid weights"):
            generate(strategy, [prompt(0, [5])])
        return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("announced, phase", [(False, "weight check"), (True, "weight sync")])
def test_a_sync_that_skips_one_weight_is_caught_by_name(two_ranks, tmp_path, announced, phase):
    """WGT-01"""
    folder = tiny_models.save_model(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    messages = two_ranks.run(sync_without_one_weight, folder, name, announced)
    assert messages == [f"{phase} failed on ranks 0-1 of 2."] * 2


def bf16_sync(folder):
    with fsdp(folder, model={"bf16": True}) as strategy, torch.no_grad():
        actor = strategy.prepare_model(load_config(folder, "auto"), "causal_lm", Actor, trainable=True)
        norm = dict(actor.model.named_parameters())["model.norm.weight"]
        norm.fill_(1.2345678)
        strategy.create_engine(tiny_models.tokenizer())
        strategy.update_engine_weights(actor)
        held = engine_weights(strategy)["model.norm.weight"]
        return held[0].item(), str(held.dtype), norm.full_tensor()[0].item(), str(norm.dtype)


def test_weights_are_cast_when_sent_and_the_master_stays(two_ranks, tmp_path):
    """WGT-08: fp32 1.2345678 is bf16 1.234375."""
    for held, held_dtype, master, master_dtype in two_ranks.run(bf16_sync, tiny_models.save_model(tmp_path)):
        assert (held, held_dtype) == (1.234375, "torch.bfloat16")
        assert (master, master_dtype) == (pytest.approx(1.2345678, abs=1e-7), "torch.float32")


def mixed_weights(dtype):
    """Weights that a rank gathers, and the wanted ones: the last norm and the buffers are plain tensors."""
    with fsdp() as strategy, torch.no_grad():
        hf_model = tiny_models.random_model(tiny_models.qwen2())
        hf_model.model.register_buffer("scale", torch.tensor([1.2345678, 3.0]))
        hf_model.model.register_buffer("count", torch.tensor(257))
        wanted = {name: tensor.clone() for name, tensor in persistent_tensors(hf_model)}
        actor = Actor(hf_model)
        plain = hf_model.model.norm.weight
        for layer in decoder_layers(hf_model):
            fully_shard(layer, mesh=strategy.mesh)
        fully_shard(actor, mesh=strategy.mesh, ignored_params={plain})
        assert not isinstance(plain, DTensor) and isinstance(hf_model.model.embed_tokens.weight, DTensor)
        sent = {name: tensor.clone() for name, tensor in strategy.named_weights(actor, dtype)}
        plain.add_(0.5)
        moved = dict(strategy.named_weights(actor, dtype))["model.norm.weight"] - sent["model.norm.weight"]
        return sent, wanted, moved.unique().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_and_plain_tensors_of_one_model_are_sent_alike(two_ranks, dtype):
    """WGT-10: a parameter that FSDP2 ignores, and saved buffers; a counter keeps its dtype, as bf16 has no 257."""
    for sent, wanted, moved in two_ranks.run(mixed_weights, dtype):
        assert sent.keys() == wanted.keys() and {"model.scale", "model.count"} < sent.keys()
        for name, tensor in wanted.items():
            assert torch.equal(sent[name], tensor.to(dtype) if tensor.is_floating_point() else tensor)
        assert moved == [0.5]


def sleep_cycle(folder):
    with fsdp(folder) as strategy:
        actor = synced(strategy, folder)
        states = [strategy.engine.state]
        prompts = [prompt(strategy.rank, [5, 6, 7])]
        first = generate(strategy, prompts, temperature=0.0)
        states.append(strategy.engine.state)
        strategy.sleep_engine()
        states.append(strategy.engine.state)
        with pytest.raises(RuntimeError, match="no valid weights"):
            generate(strategy, prompts, temperature=0.0)
        strategy.register_actor(actor)
        second = generate(strategy, prompts, temperature=0.0)
        return states, [o.response_ids for o in first[0]] == [o.response_ids for o in second[0]]


def test_dropped_weights_are_synced_before_generating_or_it_raises(two_ranks, tmp_path):
    """WGT-03: greedy output before equals that after sleep, wake and sync."""
    for states, equal in two_ranks.run(sleep_cycle, tiny_models.save_model(tmp_path)):
        assert states == [EngineState.WEIGHTS, EngineState.AWAKE, EngineState.DROPPED]
        assert equal


def prompt_after_sync(folder):
    with fsdp(folder) as strategy, torch.no_grad():
        actor = synced(strategy, folder)
        prompts = [prompt(0, [5, 6, 7, 8])]
        generate(strategy, prompts, n=3)
        for parameter in actor.parameters():
            parameter.mul_(1.5)
        strategy.update_engine_weights(actor)
        used = generate(strategy, prompts, n=3)
        strategy.create_engine(tiny_models.tokenizer())
        strategy.update_engine_weights(actor)
        fresh = generate(strategy, prompts, n=3)
        return [(o.response_ids, o.log_probs) for o in used[0]] == [(o.response_ids, o.log_probs) for o in fresh[0]]


def test_a_prompt_seen_before_the_sync_gives_what_a_fresh_engine_gives(two_ranks, tmp_path):
    """WGT-04: nothing that the old weights made survives."""
    assert two_ranks.run(prompt_after_sync, tiny_models.save_model(tmp_path)) == [True, True]


def may_gather_ahead(folder):
    """Whether any bucket may be gathered ahead, for an engine that takes nothing beside them, and one that does."""
    asked = []

    def note(buckets, gathers, may_overlap):
        asked.append(any(may_overlap))
        return gathered_ahead(buckets, gathers, may_overlap)

    with fsdp(folder, rollout={"weight_check": "off", "weight_bucket_bytes": 2**15}) as strategy:
        actor = synced(strategy, folder)
        with mock.patch.object(broadcast_utils, "gathered_ahead", note):
            for staging_bytes in (0, 2**40):
                strategy.engine.engine.staging_bytes = staging_bytes
                strategy.update_engine_weights(actor)
    return asked


def test_what_an_engine_takes_beside_the_buckets_counts(two_ranks, tmp_path):
    """MEM-04."""
    assert two_ranks.run(may_gather_ahead, tiny_models.save_model(tmp_path)) == [[True, False]] * 2


class EchoEngine:
    """Answers with the prompt's row and the sample's seed."""

    staging_bytes = 0

    def generate(self, prompts, params, seeds):
        return [
            [GenerationOutput([p.row, seed], "stop", None, 0) for seed in keys]
            for p, keys in zip(prompts, seeds, strict=True)
        ]

    def check_weights(self, specs): ...
    def update_weights(self, bucket): ...
    def verify_weights(self, bucket): ...
    def finish_weight_update(self, version): ...
    def sleep(self): ...
    def wake_up(self, tags=None): ...
    def device_bytes(self):
        return {}


def echoed():
    with fsdp(rollout={"engine_tp_size": 2}) as strategy:
        strategy.engine = ManagedEngine(EchoEngine(), sleep_level=None)
        strategy.engine.begin_weight_update([])
        strategy.engine.finish_weight_update(1)
        rows = [range(3), range(10, 15)][strategy.rank]
        outputs = generate(strategy, [prompt(row, [row]) for row in rows], n=4)
        results = [[tuple(o.response_ids) for o in group] for group in outputs]
        groups: list[list[Experience]] = [
            [sample([row], [2] * (1 + row % 3), group=row, index=j) for j in range(4)] for row in rows
        ]
        balanced = [[s.order for s in group] for group in strategy.dealer.balance_groups(groups)]
        return results, balanced


def test_each_rank_gets_its_own_prompts_back_in_order_and_groups_stay_whole(two_ranks):
    """DIST-06: TP 2, 3 and 5 prompts, n = 4: 12 and 20 results."""
    (first, first_groups), (second, second_groups) = two_ranks.run(echoed)
    assert first == [[(row, 100 * row + j) for j in range(4)] for row in range(3)]
    assert second == [[(row, 100 * row + j) for j in range(4)] for row in range(10, 15)]
    assert (sum(map(len, first)), sum(map(len, second))) == (12, 20)
    groups = first_groups + second_groups
    assert sorted(groups) == [[(row, j) for j in range(4)] for row in [0, 1, 2, 10, 11, 12, 13, 14]]


class SleeplessEngine(EchoEngine):
    def sleep(self):
        raise MemoryError("no page-locked memory is left")


def sleeping():
    with fsdp() as strategy:
        engine = SleeplessEngine() if strategy.rank == 1 else EchoEngine()
        strategy.engine = ManagedEngine(engine, sleep_level=1)
        with pytest.raises(RuntimeError, match="no page-locked memory") as caught:
            strategy.sleep_engine()
        return str(caught.value).splitlines()[0]


def test_an_engine_that_cannot_sleep_on_one_rank_ends_all(two_ranks):
    assert two_ranks.run(sleeping) == ["engine sleep failed on rank 1 of 2."] * 2
