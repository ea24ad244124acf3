"""DeepSpeed's ZeRO on two real ranks: what it must do that its own defaults do not promise."""

import gc
import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lightrft.models.actor import Actor
from lightrft.models.collate import collate
from lightrft.models.critic import Critic
from lightrft.models.loading import load_config
from lightrft.models.lora import sent_weights
from lightrft.strategy.deepspeed import library
from lightrft.strategy.roles import hf_model_of
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.utils.watch import GROUP_TIMEOUT_GRACE_SECONDS
from tests import tiny_models
from tests.distributed.ranks import spawn_ranks
from tests.distributed.runs import config, strategy_on
from tests.tiny_models import random_samples

STAGES = ["zero1", "zero2", "zero3"]
FLAGS = {"optimizer": {"lr_scheduler": "constant", "lr_warmup_steps": 0, "max_nonfinite_steps": 2}}


def actor_role(strategy, folder, learning_rate=1e-2):
    model = strategy.prepare_model(load_config(folder, "auto"), "causal_lm", Actor, trainable=True)
    return strategy.prepare_optimizer("actor", model, learning_rate, 100)


def loss_of(role, sample):
    return -role.model(collate([sample], "packed"), 1.0).log_probs.mean()


def saved_state(strategy, role):
    """Every number that a checkpoint holds of this rank."""
    return [tensor.clone() for tensor in strategy._state_of(role).tensors().values()]


def is_same(before, after):
    local = [[t.to_local() if isinstance(t, DTensor) else t for t in tensors] for tensors in (before, after)]
    return len(before) == len(after) and all(map(torch.equal, *local))


def bad_steps(backend, folder, adam_offload):
    """A step, one whose loss is NaN on rank 1 in the first of two micro-batches, another step, and two bad ones."""
    with strategy_on(backend, folder, strategy={"adam_offload": adam_offload}, **FLAGS) as strategy:
        role = actor_role(strategy, folder)
        samples = random_samples(2, seed=strategy.rank)
        outcomes = []
        for bad in (False, True, False, True, True):
            before, total = saved_state(strategy, role), torch.zeros(())
            for i, sample in enumerate(samples):
                loss = loss_of(role, sample)
                if bad and strategy.rank == 1 and i == 0:
                    # Its gradient is finite.
                    loss = loss + torch.nan
                strategy.backward(loss, role, is_last=i == 1)
                total += loss.detach()
            try:
                result = strategy.optimizer_step(role, total)
                outcomes.append((result.skipped, torch.isfinite(torch.tensor(result.grad_norm)).item()))
            except RuntimeError as error:
                outcomes.append(str(error).split(" (")[0])
            assert is_same(before, saved_state(strategy, role)) == bad
        return outcomes, role.scheduler.last_epoch


@pytest.mark.parametrize(("backend", "adam_offload"), [*((stage, False) for stage in STAGES), ("zero2", True)])
def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all(two_ranks, tmp_path, backend, adam_offload):
    """Masters, moments and the schedule stay to the bit, and what was accumulated is forgotten."""
    folder = tiny_models.save_model(tmp_path)
    for outcomes, scheduled in two_ranks.run(bad_steps, backend, folder, adam_offload):
        assert outcomes[:4] == [(False, True), (True, False), (False, True), (True, False)]
        assert outcomes[4] == "2 actor steps in a row had a loss or gradient norm that is not finite"
        assert scheduled == 2


def trained_around_a_gather(backend, folder, gathers):
    """Weights after two steps of two micro-batches, with all weights gathered in the middle of each step."""
    shapes = []
    with strategy_on(backend, folder, **FLAGS) as strategy:
        role = actor_role(strategy, folder)
        samples = random_samples(2, seed=strategy.rank)
        for _ in range(2):
            total = torch.zeros(())
            for i, sample in enumerate(samples):
                loss = loss_of(role, sample)
                strategy.backward(loss, role, is_last=i == 1)
                total += loss.detach()
                if gathers:
                    shapes += [tuple(w.shape) for _, w in strategy.named_weights(role.model, torch.bfloat16)]
            strategy.optimizer_step(role, total)
        sent = sent_weights(hf_model_of(role.model))
        announced = [tuple(spec.shape) for spec in strategy.weight_specs(sent, torch.bfloat16)]
        weights = {name: w.clone() for name, w in strategy.named_weights(role.model, torch.float32)}
    return weights, shapes, announced


@pytest.mark.parametrize("backend", ["zero2", "zero3"])
def test_gathering_all_weights_between_micro_batches_changes_nothing(two_ranks, tmp_path, backend):
    """WGT-09: no shape holds a 0, and steps of two micro-batches are the same to the bit."""
    folder = tiny_models.save_model(tmp_path, tiny_models.qwen2(tie_word_embeddings=False))
    plain = two_ranks.run(trained_around_a_gather, backend, folder, False)
    gathered = two_ranks.run(trained_around_a_gather, backend, folder, True)
    whole = [tuple(p.shape) for p in tiny_models.random_model(tiny_models.qwen2()).parameters()]
    for (expected, _, _), (weights, shapes, announced) in zip(plain, gathered, strict=True):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert shapes == announced * 4 and 0 not in {size for shape in shapes for size in shape}
        # The head is a weight of its own here.
        assert sorted(announced) == sorted([*whole, whole[0]])


def loaded(backend, folder):
    with strategy_on(backend, folder) as strategy:
        model = strategy.prepare_model(load_config(folder, "auto"), "causal_lm", Actor, trainable=True)
        role = strategy.prepare_optimizer("actor", model, 1e-2, 100)
        with torch.no_grad():
            got = role.model(collate(random_samples(3), "packed"), 1.0).log_probs
        hf_model = hf_model_of(role.model)
        held = sum(tensor.numel() for tensor in strategy.model_tensors(model))
        return got, hf_model.lm_head.weight is hf_model.model.embed_tokens.weight, held


@pytest.mark.parametrize(("backend", "tied"), [("zero2", True), ("zero3", True), ("zero3", False)])
def test_a_model_scores_as_the_saved_one_and_ties_stay_tied(two_ranks, tmp_path, backend, tied):
    """Weights come from rank 0 alone; under ZeRO-3 a rank keeps half of each, and what is no matrix whole."""
    settings = tiny_models.qwen2(tie_word_embeddings=tied)
    folder = tiny_models.save_model(tmp_path, settings)
    model = tiny_models.random_model(settings)
    expected = Actor(model)(collate(random_samples(3), "padded"), 1.0).log_probs.detach()
    count = sum(parameter.numel() for parameter in model.parameters())
    for got, is_tied, held in two_ranks.run(loaded, backend, folder):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        assert is_tied == tied
        assert held < 0.55 * count if backend == "zero3" else held >= count


def frozen_and_critic(backend, folder):
    with strategy_on(backend, folder, model={"bf16": True}, **FLAGS) as strategy:
        settings = load_config(folder, "auto")
        frozen = strategy.prepare_model(settings, "causal_lm", Actor, trainable=False)
        critic = strategy.prepare_optimizer(
            "critic", strategy.prepare_model(settings, "trunk", Critic, trainable=True), 1e-3, 10
        )
        micro = collate(random_samples(3), "packed")
        with torch.no_grad(), strategy.on_device(frozen):
            log_probs = frozen(micro, 1.0).log_probs
        values = critic.model(micro).values
        strategy.backward((values - 1.0).square().sum(), critic, is_last=True)
        strategy.optimizer_step(critic, values.sum().detach())
        moved = critic.model(micro).values.abs().sum().item()
        dtypes = {p.dtype for p in frozen.parameters()} | {p.requires_grad for p in frozen.parameters()}
        inverse_frequencies = {b.dtype for name, b in critic.model.named_buffers() if "inv_freq" in name}
        masters = {t.dtype for t in strategy._state_of(critic).tensors().values()}
        held = strategy.device_bytes([critic], {"reference": frozen})
        assert all(held[f"critic {owner}"] > 0 for owner in ("weights", "optimizer"))
        return log_probs, values.abs().sum().item(), moved, dtypes, inverse_frequencies, masters


@pytest.mark.parametrize("backend", STAGES)
def test_in_bf16_frozen_roles_are_stored_in_it_and_masters_moments_and_rotary_tables_are_not(
    two_ranks, tmp_path, backend
):
    folder = tiny_models.save_model(tmp_path)
    model = Actor(tiny_models.random_model(tiny_models.qwen2()))
    expected = model(collate(random_samples(3), "padded"), 1.0).log_probs.detach()
    results = two_ranks.run(frozen_and_critic, backend, folder)
    for log_probs, start, moved, dtypes, inverse_frequencies, masters in results:
        torch.testing.assert_close(log_probs, expected, atol=0.3, rtol=0)
        assert start == 0.0 < moved
        assert dtypes == {torch.bfloat16, False}
        assert inverse_frequencies == masters == {torch.float32}


def small_steps(backend):
    flags = {"model": {"bf16": True}, **FLAGS}
    with strategy_on(backend, **flags) as strategy:
        model = nn.Linear(2, 2, bias=False)
        nn.init.ones_(model.weight)
        role = strategy.prepare_optimizer("actor", model, 1e-6, 1000)
        for _ in range(300):
            loss = role.model(torch.ones(1, 2, dtype=torch.bfloat16)).sum()
            strategy.backward(loss, role, is_last=True)
            strategy.optimizer_step(role, loss.detach())
        [master] = [t for name, t in strategy._state_of(role).tensors().items() if "/weights/" in name]
        return master.full_tensor().flatten().tolist()


@pytest.mark.parametrize("backend", ["zero1", "zero2"])
def test_bf16_steps_at_1e_6_move_a_weight_by_the_fp32_amount(two_ranks, backend):
    """Adam moves by lr a step, just under 1 by 17 fp32 spacings of 2^-24; a weight stored in bf16 would stay at 1."""
    for weight in two_ranks.run(small_steps, backend):
        assert weight == pytest.approx([1 - 300 * 17 * 2**-24] * 4, abs=1e-6)


def trained_with_moves(backend, folder, moves):
    """Weights after three steps, between which everything was away, and what a rank holds in fp32 of each weight."""
    with strategy_on(backend, folder, **FLAGS) as strategy:
        role = actor_role(strategy, folder)
        mover = strategy._moves[role.model]
        for i in range(3):
            loss = loss_of(role, random_samples(3, seed=strategy.rank)[i])
            strategy.backward(loss, role, is_last=True)
            strategy.optimizer_step(role, loss.detach())
            if moves:
                mover.offload_optimizer()
                mover.offload_weights()
                # The weights come back alone, to score, and then the optimizer.
                mover.reload_weights()
                mover.reload_optimizer()
        held = strategy.device_bytes([role], {})
        weights = {name: w.clone() for name, w in strategy.named_weights(role.model, torch.float32)}
    return weights, held


@pytest.mark.parametrize("backend", STAGES)
def test_moving_weights_and_optimizer_between_steps_changes_nothing(two_ranks, tmp_path, backend):
    """MEM-03: on a CPU they move from the host to the host, by the same calls. Adam has 12 bytes a weight."""
    folder = tiny_models.save_model(tmp_path)
    count = sum(parameter.numel() for parameter in tiny_models.random_model(tiny_models.qwen2()).parameters())
    plain = two_ranks.run(trained_with_moves, backend, folder, False)
    moved = two_ranks.run(trained_with_moves, backend, folder, True)
    for (expected, _), (weights, held) in zip(plain, moved, strict=True):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        assert held["actor optimizer"] == pytest.approx(12 * count / 2, rel=0.02)
        assert held["actor gradients"] == (pytest.approx(4 * count / 2, rel=0.02) if backend == "zero3" else 0)
        assert held["actor weights"] == pytest.approx(4 * count / (2 if backend == "zero3" else 1), rel=0.02)


def notes(device: str, stage: int, **flags: dict[str, object]) -> list[str]:
    strategy = get_strategy(config(strategy={"fsdp": False, "zero_stage": stage, **flags.pop("strategy", {})}, **flags))
    strategy.device = torch.device(device)
    return strategy.memory_notes()


def test_what_cannot_move_is_named():
    bf16, moves = {"bf16": True}, {"offload_actor": True}
    assert notes("cuda", 2, model=bf16, strategy=moves) == []
    assert notes("cuda", 1, model=bf16, strategy=moves) == [
        "DeepSpeed cannot move what ZeRO-1 trains in bf16, so nothing moves: --offload_actor"
    ]
    assert notes("cuda", 3, strategy={"adam_offload": True}) == [
        "DeepSpeed keeps fp32 weights and Adam's state on the host and steps there (--adam_offload)",
        "ZeRO-3 keeps the reference on the host, and brings a layer at a time to the device",
    ]
    # An adapter's reference is the actor, whose weights stay.
    assert notes("cuda", 3, model={"lora_rank": 8}) == []
    assert notes("cuda", 3, model={"lora_rank": 8, "teacher_pretrain": "large"}) == [
        "ZeRO-3 keeps the teacher on the host, and brings a layer at a time to the device"
    ]
    assert notes("cpu", 3, strategy=moves) == ["this rank has no GPU, so nothing moves: --offload_actor"]


def two_strategies(folder):
    """What a model of each scores, with a process group of its own; and how long its collectives may take."""
    scores, timeouts = [], set()
    for _ in range(2):
        with strategy_on("zero3", folder, strategy={"dist_timeout_seconds": 123.0}) as strategy:
            role = actor_role(strategy, folder)
            loss = loss_of(role, random_samples(1)[0])
            strategy.backward(loss, role, is_last=True)
            strategy.optimizer_step(role, loss.detach())
            scores.append(loss.item())
            backends = [group._get_backend(torch.device("cpu")) for group in dist.distributed_c10d._world.pg_map]
            timeouts |= {backend.options._timeout.total_seconds() for backend in backends}
    return scores, timeouts


def test_deepspeed_makes_its_group_with_our_timeout_and_a_second_one_after_it(tmp_path):
    """DIST-07"""
    folder = tiny_models.save_model(tmp_path)
    for result in spawn_ranks(two_strategies, 2, folder, init_group=False):
        assert result.returncode == 0, result.stderr
        (first, second), timeouts = result.value
        assert first == second
        assert timeouts == {123.0 + GROUP_TIMEOUT_GRACE_SECONDS}
        assert result.stdout == ""


def is_freed(backend, folder):
    """Whether a closed strategy's model is gone with the last name for it."""
    with strategy_on(backend, folder) as strategy:
        role = actor_role(strategy, folder)
        strategy.backward(loss_of(role, random_samples(1)[0]), role, is_last=True)
        parameter = weakref.ref(next(hf_model_of(role.model).parameters()))
    del strategy, role
    gc.collect()
    return parameter() is None


@pytest.mark.parametrize("backend", STAGES)
def test_a_closed_strategy_keeps_no_model(two_ranks, tmp_path, backend):
    """The next one in the process may need its memory."""
    assert two_ranks.run(is_freed, backend, tiny_models.save_model(tmp_path)) == [True, True]


@torch.no_grad()
def gathered_without_a_copy(folder):
    """Whether what is given is what was gathered; and whether each is whole when others have been gathered since."""
    places = []

    @contextmanager
    def noted(tensors):
        with gathered(tensors):
            yield
            places.append(tensors[0].data_ptr())

    with strategy_on("zero3", folder) as strategy:
        model = hf_model_of(actor_role(strategy, folder).model)
        matrices = {name: weight for name, weight in model.named_parameters() if len(weight.ds_shape) == 2}
        gathered = library.gathered
        with mock.patch.object(library, "gathered", noted):
            whole = [strategy.full_tensors([weight], [weight.dtype])[0] for weight in matrices.values()]
        expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=whole[0].dtype).named_parameters())
        are_whole = all(torch.equal(expected[name], tensor) for name, tensor in zip(matrices, whole, strict=True))
        return places == [tensor.data_ptr() for tensor in whole], are_whole


def test_what_zero3_gathers_is_given_without_a_copy(two_ranks, tmp_path):
    """MEM-04: a sync would take the largest weight once more."""
    assert two_ranks.run(gathered_without_a_copy, tiny_models.save_model(tmp_path)) == [(True, True)] * 2
