"""A sync notices what an engine has lost, misplaced or changed, and takes no more memory than it says."""

import time
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightrft.models.actor import Actor
from lightrft.models.loading import load_config
from lightrft.models.lora import sent_weights
from lightrft.strategy.torch_utils.torch_engine import TorchEngine
from lightrft.strategy.utils.sync_plan import check_turns
from tests import tiny_models
from tests.distributed.runs import fsdp

KEYS, VALUES = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv")


class LossyEngine(TorchEngine):
    """Loses a weight on its way, and does not know of it."""

    lost = "model.layers.1.mlp.up_proj.weight"

    def update_weights(self, bucket):
        super().update_weights([pair for pair in bucket if pair[0] != self.lost])
        self._round.note([(self.lost, torch.empty(0))])


def synced(strategy, folder):
    actor = strategy.prepare_model(load_config(folder, "auto"), "causal_lm", Actor, trainable=True)
    strategy.create_engine(tiny_models.tokenizer())
    return actor, strategy.update_engine_weights(actor)


def misplace(strategy):
    """Two weights of the engine get one place."""
    weights = strategy.engine.engine._weights
    weights[KEYS] = weights[VALUES]


def lose(strategy):
    strategy.engine.engine.__class__ = LossyEngine


def sync_with_fault(folder, fault, mode, failing_rank):
    """The syncs that went well with the faulty engine, and the message of the one that did not."""
    with fsdp(folder, rollout={"weight_check": mode}) as strategy:
        actor, first = synced(strategy, folder)
        sizes = [spec.num_bytes for spec in strategy.weight_specs(sent_weights(actor.model), torch.float32)]
        num_turns = len(check_turns(sizes, strategy.config.rollout.weight_bucket_bytes))
        if strategy.rank == failing_rank:
            fault(strategy)
        with torch.no_grad():
            for parameter in actor.parameters():
                parameter.add_(0.5)
        records = [first]
        try:
            for _ in range(num_turns):
                records.append(strategy.update_engine_weights(actor))
        except RuntimeError as error:
            return records, num_turns, str(error)
        return records, num_turns, None


@pytest.mark.parametrize("fault, names", [(misplace, [KEYS]), (lose, [LossyEngine.lost])])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_check_names_what_one_rank_has_lost_or_misplaced_on_all_ranks(
    two_ranks, tmp_path, fault, names, failing_rank
):
    folder = tiny_models.save_model(tmp_path)
    for records, _, message in two_ranks.run(sync_with_fault, folder, fault, "full", failing_rank):
        assert len(records) == 1
        assert message.startswith(f"weight sync failed on rank {failing_rank} of 2.")
        assert f"{len(names)} of 26 that were checked differ: {', '.join(names)}." in message
        assert "at version 2" in message


@pytest.mark.parametrize("fault", [misplace, lose])
def test_samples_find_a_fault_once_the_weight_has_had_its_turn(two_ranks, tmp_path, fault):
    folder = tiny_models.save_model(tmp_path)
    for records, num_turns, message in two_ranks.run(sync_with_fault, folder, fault, "sample", 1):
        # 26 weights: two turns of 13.
        assert [record.num_verified for record in records] == [13] * len(records)
        assert num_turns == 2 and "weight sync failed on rank 1 of 2." in message


def test_without_a_check_a_lost_weight_goes_unnoticed(two_ranks, tmp_path):
    folder = tiny_models.save_model(tmp_path)
    for records, num_turns, message in two_ranks.run(sync_with_fault, folder, lose, "off", 1):
        assert message is None and len(records) == 1 + num_turns
        assert {record.num_verified for record in records} == {0}


def gathers(folder, mode):
    """How often each weight was gathered in one sync."""
    with fsdp(folder, rollout={"weight_check": mode, "weight_bucket_bytes": 20_000}) as strategy:
        actor, _ = synced(strategy, folder)
        gather, counts = strategy.full_tensors, []

        def counting(tensors, dtypes):
            counts.append(len(tensors))
            return gather(tensors, dtypes)

        strategy.full_tensors = counting
        strategy.update_engine_weights(actor)
        return len(counts), sum(counts)


@pytest.mark.parametrize("mode, rounds, num_gathered", [("off", 1, 26), ("sample", 1, 26 + 5), ("full", 2, 2 * 26)])
def test_what_is_checked_is_gathered_again(two_ranks, tmp_path, mode, rounds, num_gathered):
    """Of 26 weights, the third of eleven turns, that of version 2, has five."""
    for num_buckets, num_weights in two_ranks.run(gathers, tiny_models.save_model(tmp_path), mode):
        assert num_buckets > 2 * rounds
        assert num_weights == num_gathered


class MemoryWatch(TorchDispatchMode):
    """Bytes of the storages made inside, at their peak."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.alive = self.peak = 0
        self._seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **kwargs or {})
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), known)
        return results

    def _note(self, storage, known):
        key, size = storage._cdata, storage.nbytes()
        if key in known or key in self._seen:
            return
        self._seen.add(key)
        # Gloo's own thread lets go of a tensor some time after the collective.
        deadline = time.monotonic() + 2
        while self.alive + size > self.limit and time.monotonic() < deadline:
            time.sleep(0.001)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key, size):
        self._seen.discard(key)
        self.alive -= size


def sync_peak(folder, owners):
    """Bytes that a sync takes at its peak, and what it may take."""
    with fsdp(folder, **owners) as strategy:
        actor, _ = synced(strategy, folder)
        sizes = [spec.num_bytes for spec in strategy.weight_specs(sent_weights(actor.model), strategy.engine_dtype)]
        # The ranks' messages at the end of a phase are tensors too.
        limit = 2 * max(strategy.config.rollout.weight_bucket_bytes, *sizes) + 1000
        with MemoryWatch(limit) as memory:
            strategy.update_engine_weights(actor)
        return memory.peak, limit, sum(sizes)


def peak_of_all_turns(folder):
    """Bytes that any of the syncs takes at its peak in which all weights are checked, and those of the largest."""
    with fsdp(folder, rollout={"weight_bucket_bytes": 1}) as strategy:
        actor, _ = synced(strategy, folder)
        sizes = [spec.num_bytes for spec in strategy.weight_specs(sent_weights(actor.model), strategy.engine_dtype)]
        limit = max(sizes) + 1000
        with MemoryWatch(limit) as memory:
            for _ in check_turns(sizes, 1):
                strategy.update_engine_weights(actor)
        return memory.peak, limit


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("mode", ["sample", "full"])
@pytest.mark.parametrize("bucket_bytes", [1, 10_000])
def test_a_sync_takes_no_more_than_two_buckets_or_twice_the_largest_weight(
    two_ranks, tmp_path, bf16, mode, bucket_bytes
):
    """MEM-04"""
    folder = tiny_models.save_model(tmp_path)
    owners = {"model": {"bf16": bf16}, "rollout": {"weight_check": mode, "weight_bucket_bytes": bucket_bytes}}
    for peak, limit, total in two_ranks.run(sync_peak, folder, owners):
        assert 0 < peak <= limit < total


def test_a_check_of_the_largest_weight_keeps_no_copy_of_it(two_ranks, tmp_path):
    """MEM-04: SGLang has it in its staging buffer; beside that, there is room for it once."""
    for peak, limit in two_ranks.run(peak_of_all_turns, tiny_models.save_model(tmp_path)):
        assert 0 < peak <= limit
