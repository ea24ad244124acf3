"""Every backend gives the same numbers, and goes on with every other one's checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrft.cli.main import main
from lightrft.config import Config
from lightrft.models.actor import Actor
from lightrft.models.collate import collate, micro_batches
from lightrft.models.loading import load_config
from lightrft.ops.aggregation import mean_scale
from lightrft.ops.losses import ppo_clip_loss
from lightrft.ops.segments import masked_sum
from lightrft.strategy.deepspeed import settings
from lightrft.types import Experience
from tests import tiny_models
from tests.distributed.resumed_runs import assert_same, history, run, six_steps
from tests.distributed.runs import BACKENDS, make_config, strategy_on
from tests.distributed.test_checkpoints import exported_weights
from tests.tiny_models import random_samples

UPDATES = [11, 3, 8, 2, 7]
"""Samples of each update: micro-batches of two make 3, 1, 2, 1 and 2 of them on each rank."""
DEEPSPEED = [name for name in BACKENDS if name != "fsdp"]


def recorded_rollout() -> list[Experience]:
    """Samples with the log-probs of the policy that is trained first, and advantages of either sign."""
    samples = random_samples(max(UPDATES))
    actor = Actor(tiny_models.random_model(tiny_models.qwen2()))
    torch.manual_seed(1)
    with torch.no_grad():
        old = [actor(collate([sample], "padded"), 1.0).log_probs for sample in samples]
    return [
        replace(sample, action_log_probs=log_probs, advantages=torch.randn(len(log_probs)))
        for sample, log_probs in zip(samples, old, strict=True)
    ]


def update(strategy, role, samples):
    """One optimizer step of PPO on this rank's share; loss, norm and number of micro-batches."""
    mine = [samples[i] for i in strategy.local_share(len(samples))]
    plan = strategy.agree_plan(mine, padded=False)
    [tokens] = strategy.collectives.all_reduce_sum([sum(len(s.action_mask) for s in mine)])
    total = torch.zeros((), device=strategy.device)
    for micro, _, is_last in micro_batches(mine, plan, "packed", strategy.device):
        log_probs = role.model(micro, 1.0).log_probs
        losses = ppo_clip_loss(log_probs, micro.action_log_probs, micro.advantages, 0.2, 0.2).losses
        loss = masked_sum(losses, micro.action_mask) * mean_scale(tokens, strategy.world_size)
        strategy.backward(loss, role, is_last)
        total += loss.detach()
    norm = strategy.optimizer_step(role, total).grad_norm
    [mean] = strategy.collectives.all_reduce_sum([float(total) / strategy.world_size])
    return mean, norm, len(plan)


def replayed(backend, folder, samples):
    """Losses, norms, numbers of micro-batches and final weights of five updates."""
    flags = {
        "train": {"micro_train_batch_size": 2},
        "optimizer": {"lr_scheduler": "linear", "lr_warmup_steps": 2, "l2": 0.1},
    }
    # Otherwise a model this small would fill no bucket, and have no weight larger than one: its largest has 2048.
    with pytest.MonkeyPatch.context() as patch, strategy_on(backend, folder, **flags) as strategy:
        patch.setattr(settings, "REDUCE_BUCKET", 1500)
        model = strategy.prepare_model(load_config(folder, "auto"), "causal_lm", Actor, trainable=True)
        role = strategy.prepare_optimizer("actor", model, 1e-2, 8)
        results = [update(strategy, role, samples[:count]) for count in UPDATES]
        weights = {name: w.clone() for name, w in strategy.named_weights(role.model, torch.float32)}
    return results, weights


def test_a_recorded_rollout_gives_the_same_losses_norms_and_weights_on_every_backend(two_ranks, tmp_path):
    folder, samples = tiny_models.save_model(tmp_path), recorded_rollout()
    results = {name: two_ranks.run(replayed, name, folder, samples) for name in BACKENDS}
    [(expected, wanted), _] = results["fsdp"]
    assert [count for *_, count in expected] == [3, 1, 2, 1, 2]
    start = dict(tiny_models.random_model(tiny_models.qwen2()).named_parameters())
    for name, ranks in results.items():
        for history_of_rank, weights in ranks:
            for got, want in zip(history_of_rank, expected, strict=True):
                assert got == pytest.approx(want, abs=1e-4), name
            assert weights.keys() == wanted.keys()
            assert max((weights[key] - wanted[key]).abs().max().item() for key in wanted) < 1e-4, name
    assert max((wanted[key] - start[key]).abs().max().item() for key in wanted) > 1e-2


def on(backend: str, **strategy: object) -> dict[str, object]:
    return BACKENDS[backend] | strategy


@pytest.mark.parametrize("backend", DEEPSPEED)
def test_a_live_run_starts_as_that_on_fsdp2_does(two_ranks, task, tmp_path, backend):
    """The policy that is trained is the one that sampled: ratios are exactly 1, and the engine equals the actor."""
    algorithm = {"advantage_estimator": "gae", "init_kl_coef": 0.05}
    configs = {
        name: make_config(task, tmp_path / name, algorithm=algorithm, strategy=on(name)) for name in ("fsdp", backend)
    }
    for config in configs.values():
        assert two_ranks.run(run, config) == [0, 0]
    (_, first, second), (_, wanted, _) = history(configs[backend]), history(configs["fsdp"])
    assert first == pytest.approx(wanted, abs=1e-4)
    for line in (first, second):
        assert line["train/ppo_kl"] == line["train/clip_low"] == line["train/clip_high"] == 0.0
        assert line["rollout/log_prob_mismatch"] < 1e-5
    assert first["kl/reference"] == pytest.approx(0.0, abs=1e-6) != second["kl/reference"]


EVERY_OPTION = {"advantage_estimator": "gae", "init_kl_coef": 0.05, "freezing_actor_steps": 1}


@pytest.mark.parametrize(
    ("backend", "adam_offload"), [("zero1", False), ("zero2", True), ("zero3", False), ("zero3", True)]
)
def test_four_steps_equal_two_a_stop_and_two(two_ranks, task, tmp_path, backend, adam_offload):
    """CKPT-03: masters and moments of actor and critic, the reference, and the schedules."""
    options = {
        "algorithm": EVERY_OPTION,
        "strategy": on(backend, adam_offload=adam_offload),
        "train": {"num_episodes": 2},
    }
    straight = six_steps(task, tmp_path / "straight", **options)
    assert two_ranks.run(run, straight) == [0, 0]
    broken = six_steps(task, tmp_path / "broken", **options, checkpoint={"load_checkpoint": True})
    assert two_ranks.run(run, broken, 2) == [143, 143]
    assert two_ranks.run(run, broken) == [0, 0]
    assert_same(broken, straight)


def with_backend(config: Config, backend: str) -> Config:
    return replace(config, strategy=replace(config.strategy, **{"zero_stage": None} | BACKENDS[backend]))


def test_backends_and_numbers_of_ranks_go_on_with_one_another_s_checkpoints(two_ranks, one_rank, task, tmp_path):
    """CKPT-03: FSDP2 on two ranks, ZeRO-3 on two, ZeRO-2 on one, FSDP2 on two: as one run, but for rounding."""
    algorithm = {"advantage_estimator": "gae"}
    straight = six_steps(task, tmp_path / "straight", algorithm=algorithm)
    assert two_ranks.run(run, straight) == [0, 0]
    moved = six_steps(task, tmp_path / "moved", algorithm=algorithm, checkpoint={"load_checkpoint": True})
    assert two_ranks.run(run, moved, 2) == [143, 143]
    assert two_ranks.run(run, with_backend(moved, "zero3"), 3) == [143, 143]
    assert one_rank.run(run, with_backend(moved, "zero2"), 4, 0) == [143]
    assert two_ranks.run(run, moved) == [0, 0]
    assert_same(moved, straight, tolerance=1e-4)


@pytest.mark.parametrize("backend", ["zero2", "zero3"])
def test_an_export_of_a_deepspeed_checkpoint_equals_the_final_model(two_ranks, task, tmp_path, backend):
    """CKPT-06: in one process, which has no group."""
    config = six_steps(task, tmp_path / "run", train={"num_episodes": 1}, strategy=on(backend))
    assert two_ranks.run(run, config) == [0, 0]
    assert main(["export", str(tmp_path / "run" / "ckpt"), str(tmp_path / "out")]) == 0
    exported = exported_weights(tmp_path / "out")
    final = exported_weights(Path(config.train.save_path) / "model")
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], final[name]) for name in final)
