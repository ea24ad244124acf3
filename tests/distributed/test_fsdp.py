"""FSDP2 on two real ranks trains as one process does."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from lightrft.models.actor import Actor
from lightrft.models.collate import collate, micro_batches
from lightrft.models.critic import Critic
from lightrft.models.loading import load_config
from lightrft.ops.aggregation import mean_scale
from lightrft.ops.segments import masked_sum
from tests import tiny_models
from tests.distributed.runs import fsdp
from tests.tiny_models import random_samples, sample


def actor_role(strategy, folder, learning_rate=1e-2, packing="auto"):
    loaded = load_config(folder, packing)
    model = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=True)
    return strategy.prepare_optimizer("actor", model, learning_rate, 100)


def train(strategy, role, samples, layout="packed"):
    """One optimizer step on the mean negative log-prob of this rank's samples; returns the loss and the norm."""
    plan = strategy.agree_plan(samples, layout == "padded")
    [tokens] = strategy.collectives.all_reduce_sum([sum(int(s.action_mask.sum()) for s in samples)])
    total = torch.zeros(())
    for micro, _, is_last in micro_batches(samples, plan, layout, strategy.device):
        loss = -masked_sum(role.model(micro, 1.0).log_probs, micro.action_mask)
        loss = loss * mean_scale(tokens, strategy.world_size)
        strategy.backward(loss, role, is_last)
        total += loss.detach()
    result = strategy.optimizer_step(role, total)
    [mean] = strategy.collectives.all_reduce_sum([float(total) / strategy.world_size])
    return mean, result.grad_norm, len(plan)


def reference(samples, steps=2, lr=1e-2):
    """The same training in one plain process."""
    model = tiny_models.random_model(tiny_models.qwen2())
    actor = Actor(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    history = []
    for _ in range(steps):
        losses = [actor(collate([one], "padded"), 1.0).log_probs for one in samples]
        loss = -torch.cat(losses).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.item(), norm.item()))
    return history, dict(model.named_parameters())


FLAGS = {"optimizer": {"lr_scheduler": "constant", "lr_warmup_steps": 0}}


def unequal_ranks_match_one_process(folder, offload):
    flags = FLAGS | {
        "train": {"max_tokens_per_micro_batch": 32},
        "strategy": {"fsdp_cpu_offload": offload},
    }
    with fsdp(folder, **flags) as strategy:
        role = actor_role(strategy, folder)
        lengths = [[10, 10], [30, 30, 30, 30]]
        every = [
            sample([3, 4], [2 + i % 7 for i in range(n - 2)], group=n + k)
            for k, part in enumerate(lengths)
            for n in part
        ]
        mine = every[:2] if strategy.rank == 0 else every[2:]
        history = [train(strategy, role, mine) for _ in range(2)]
        weights = dict(strategy.named_weights(role.model, torch.float32))
        expected, parameters = reference(every)
        for (loss, norm, _), (expected_loss, expected_norm) in zip(history, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-5)
        difference = max((weights[name] - p).abs().max().item() for name, p in parameters.items())
        return history[-1][2], difference


@pytest.mark.parametrize("offload", [False, True])
def test_ranks_with_unequal_lengths_run_equally_many_forwards_and_match_one_process(two_ranks, tmp_path, offload):
    """DIST-01: lengths 10, 10 and 30 x 4 under a budget of 32: four forwards on both ranks, gradients as in one."""
    results = two_ranks.run(unequal_ranks_match_one_process, tiny_models.save_model(tmp_path), offload)
    assert [count for count, _ in results] == [4, 4]
    assert all(difference < 2e-5 for _, difference in results)


class Scalar(nn.Module):
    """Loss = weight x input: its gradient is the input."""

    def __init__(self, size=1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def sharded_scalar(strategy, size, offload=None):
    model = Scalar(size)
    fully_shard(model, mesh=strategy.mesh, offload_policy=offload or OffloadPolicy())
    return strategy.prepare_optimizer("actor", model, 1.0, 10)


def global_token_mean():
    with fsdp() as strategy:
        role = sharded_scalar(strategy, 2)
        gradients = [[1.0], [2.0, 2.0, 2.0]][strategy.rank]
        scale = mean_scale(4, strategy.world_size)
        loss = sum(role.model(torch.tensor([g, 0.0])) for g in gradients) * scale
        strategy.backward(loss, role, is_last=True)
        return role.model.weight.grad.full_tensor()[0].item()


def test_token_mean_is_global_whatever_the_rank_count(two_ranks):
    """NUM-06: (1 + 2 + 2 + 2) / 4 = 1.75, not the mean of rank means 1.5."""
    assert two_ranks.run(global_token_mean) == [1.75, 1.75]


def clipped_shards(offload):
    with fsdp() as strategy:
        role = sharded_scalar(strategy, 2, CPUOffloadPolicy(pin_memory=False) if offload else None)
        loss = role.model(torch.tensor([3.0, 4.0]))
        strategy.backward(loss, role, is_last=True)
        norm = strategy.clip_grad_norm(role, loss_is_finite=True)
        return norm, role.model.weight.grad.full_tensor().tolist()


@pytest.mark.parametrize("offload", [False, True])
def test_clipping_uses_the_norm_over_all_shards(two_ranks, offload):
    """DIST-08: shards 3 and 4 have norm 5; clipped to 1: 3/5 and 4/5."""
    for norm, gradient in two_ranks.run(clipped_shards, offload):
        assert norm == pytest.approx(5.0)
        assert gradient == pytest.approx([0.6, 0.8])


def nonfinite_on_rank_1():
    with fsdp(optimizer={"max_nonfinite_steps": 2, "lr_warmup_steps": 0}) as strategy:
        role = sharded_scalar(strategy, 2)
        outcomes = []
        for bad in (True, False, True, True):
            loss = role.model(torch.tensor([1.0, 1.0]))
            strategy.backward(loss, role, is_last=True)
            reported = torch.tensor(float("nan")) if bad and strategy.rank == 1 else loss.detach()
            before = role.model.weight.full_tensor().clone()
            try:
                outcomes.append(strategy.optimizer_step(role, reported).skipped)
            except RuntimeError as error:
                outcomes.append(str(error).split(" (")[0])
            moved = not torch.equal(before, role.model.weight.full_tensor())
            assert moved == (not bad) and role.model.weight.grad is None
        return outcomes, role.scheduler.last_epoch


def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all_and_stops_after_two(two_ranks):
    for outcomes, scheduled in two_ranks.run(nonfinite_on_rank_1):
        assert outcomes[:3] == [True, False, True]
        assert outcomes[3] == "2 actor steps in a row had a loss or gradient norm that is not finite"
        assert scheduled == 1


def loaded_equals_saved(folder, tied):
    with fsdp(folder) as strategy:
        role = actor_role(strategy, folder)
        model = role.model.model
        samples = random_samples(3)
        got = role.model(collate(samples, "packed"), 1.0).log_probs.detach()
        saved = Actor(tiny_models.random_model(tiny_models.qwen2(tie_word_embeddings=tied)))
        expected = saved(collate(samples, "padded"), 1.0).log_probs.detach()
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        train(strategy, role, samples)
        return model.lm_head.weight is model.model.embed_tokens.weight, len(list(role.model.parameters()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_sharded_model_scores_as_the_saved_one_and_ties_stay_tied(two_ranks, tmp_path, tied):
    """Meta device, shards, weights sent by rank 0, rotary buffers that no file holds."""
    folder = tiny_models.save_model(tmp_path, tiny_models.qwen2(tie_word_embeddings=tied))
    assert two_ranks.run(loaded_equals_saved, folder, tied) == [(tied, 26 if tied else 27)] * 2


def micro_batch_counts(folder):
    norms = []
    for size in (1, 2, 3, 8):
        with fsdp(folder, train={"micro_train_batch_size": size}) as strategy:
            role = actor_role(strategy, folder)
            samples = random_samples(11)
            mine = [samples[i] for i in strategy.local_share(11)]
            norms.append(train(strategy, role, mine)[:2])
    return norms


def test_gradients_do_not_depend_on_the_micro_batch_size(two_ranks, tmp_path):
    """NUM-05, NUM-19: 6 and 5 samples a rank in micro-batches of 1, 2, 3 and 8."""
    for norms in two_ranks.run(micro_batch_counts, tiny_models.save_model(tmp_path)):
        assert all(pair == pytest.approx(norms[0], rel=1e-5) for pair in norms)


def masked_micro_batch(folder):
    with fsdp(folder, train={"micro_train_batch_size": 2}) as strategy:
        role = actor_role(strategy, folder)
        samples = random_samples(2, seed=strategy.rank)
        norm = train(strategy, role, samples)[1]
    with fsdp(folder, train={"micro_train_batch_size": 2}) as strategy:
        role = actor_role(strategy, folder)
        masked = [replace(s, action_mask=torch.zeros_like(s.action_mask)) for s in random_samples(2, seed=9)]
        with_masked = train(strategy, role, random_samples(2, seed=strategy.rank) + masked)[1]
    with fsdp(folder, train={"micro_train_batch_size": 2}) as strategy:
        role = actor_role(strategy, folder)
        nothing = train(strategy, role, masked)
    return norm, with_masked, nothing


def test_a_micro_batch_with_no_kept_token_adds_exactly_nothing(two_ranks, tmp_path):
    """NUM-07"""
    for norm, with_masked, (loss, zero, _) in two_ranks.run(masked_micro_batch, tiny_models.save_model(tmp_path)):
        assert with_masked == norm > 0
        assert (loss, zero) == (0.0, 0.0)


def thousand_small_steps():
    flags = {"optimizer": {"lr_scheduler": "constant", "lr_warmup_steps": 0}, "model": {"bf16": True}}
    with fsdp(**flags) as strategy:
        model = nn.Linear(2, 2, bias=False)
        nn.init.ones_(model.weight)
        strategy._shard(model, tiny_models.random_model(tiny_models.qwen2()), offloads=False)
        role = strategy.prepare_optimizer("actor", model, 1e-6, 1000)
        for _ in range(1000):
            loss = role.model(torch.ones(1, 2)).sum()
            strategy.backward(loss, role, is_last=True)
            strategy.optimizer_step(role, loss.detach())
        return model.weight.full_tensor().flatten().tolist()


def test_a_thousand_bf16_steps_at_1e_6_move_a_weight_by_the_fp32_amount(two_ranks):
    """Adam moves by lr a step, just under 1 by 17 fp32 spacings of 2^-24; a weight stored in bf16 would stay at 1."""
    for weight in two_ranks.run(thousand_small_steps):
        assert weight == pytest.approx([1 - 1000 * 17 * 2**-24] * 4, abs=1e-6)


def frozen_and_critic(folder):
    with fsdp(folder, model={"bf16": True}) as strategy:
        loaded = load_config(folder, "auto")
        frozen = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=False)
        critic = strategy.prepare_model(loaded, "trunk", Critic, trainable=True)
        micro = collate(random_samples(3), "packed")
        values = critic(micro).values
        role = strategy.prepare_optimizer("critic", critic, 1e-3, 10)
        strategy.backward((values - 1.0).square().sum(), role, is_last=True)
        strategy.optimizer_step(role, values.sum().detach())
        moved = critic(micro).values.abs().sum().item()
        dtypes = {p.dtype for p in frozen.parameters()} | {p.requires_grad for p in frozen.parameters()}
        return values.abs().sum().item(), str(values.dtype), moved, dtypes


def test_frozen_roles_are_stored_in_bf16_and_the_critic_starts_at_zero_in_fp32(two_ranks, tmp_path):
    for start, dtype, moved, dtypes in two_ranks.run(frozen_and_critic, tiny_models.save_model(tmp_path)):
        assert (start, dtype) == (0.0, "torch.float32")
        assert moved > 0
        assert dtypes == {torch.bfloat16, False}
