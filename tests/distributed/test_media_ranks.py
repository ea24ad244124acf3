"""Ranks of which one has media and another has none (DIST-02)."""

import pytest
import torch

from lightrft.models.actor import Actor
from lightrft.models.collate import collate, micro_batches
from lightrft.models.loading import load_config
from lightrft.models.multimodal import fillers
from lightrft.ops.aggregation import mean_scale
from lightrft.ops.segments import masked_sum
from tests import tiny_media_models as tiny
from tests.distributed.runs import strategy_on
from tests.models.test_multimodal import CLIPS, FAMILIES, live

FLAGS = {"optimizer": {"lr_scheduler": "constant", "lr_warmup_steps": 0}, "train": {"micro_train_batch_size": 2}}
LEARNING_RATE = 1e-3


def kinds_of(family):
    return ["audio"] if family == "qwen2_audio" else ["image", "video"] if family in CLIPS else ["image"]


def shares(family):
    """Of each rank: the first has two micro-batches, the last of text alone; the second has one, of text alone."""
    kind, *others = kinds_of(family)
    pictures = [tiny.item(family, kind, seed, (4, 4)) for seed in range(2)]
    clips = [tiny.item(family, other, 9, (2, 4, 4)) for other in others]
    first = [tiny.sample(family, pictures[:1]), tiny.sample(family, [pictures[1], *clips], "blue")]
    return [[*first, tiny.sample(family, [], "no")], [tiny.sample(family, [], "yes it is", prompt="is it?")]]


def gradients_and_weights(backend, folder, family, own_fillers=True, prefixes=()):
    """Norms of two steps, and the weights after them."""
    flags = FLAGS | {"model": {"freeze_prefix": prefixes}}
    with strategy_on(backend, folder, **flags) as strategy:
        loaded = load_config(folder, "auto")
        model = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=True)
        role = strategy.prepare_optimizer("actor", model, LEARNING_RATE, 100)
        samples = shares(family)[strategy.rank]
        extra = fillers(loaded.hf_config, kinds_of(family)) if own_fillers else []
        plan = strategy.agree_plan(samples, padded=False)
        [tokens] = strategy.collectives.all_reduce_sum([sum(len(s.action_mask) for s in samples)])
        norms = []
        for _ in range(2):
            total = torch.zeros(())
            for micro, _, is_last in micro_batches(samples, plan, loaded.layout, strategy.device, extra):
                loss = -masked_sum(role.model(micro, 1.0).log_probs, micro.action_mask)
                loss = loss * mean_scale(tokens, strategy.world_size)
                strategy.backward(loss, role, is_last)
                total += loss.detach()
            norms.append(strategy.optimizer_step(role, total).grad_norm)
            # A forward without gradients in between, as the roles that score have it.
            with torch.no_grad():
                for micro, _, _ in micro_batches(samples, plan, loaded.layout, strategy.device, extra):
                    role.model(micro, 1.0)
        return norms, {name: w.clone() for name, w in strategy.named_weights(role.model, torch.float32)}


def in_one_process(folder, family, frozen=()):
    """The same steps on all samples, without fillers."""
    samples = [sample for share in shares(family) for sample in share]
    model = live(folder, family, "padded").train()
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(frozen)):
            parameter.requires_grad_(False)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    norms = []
    for _ in range(2):
        loss = -torch.cat([Actor(model)(collate([one], "padded"), 1.0).log_probs for one in samples]).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(learning, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, dict(model.named_parameters())


def assert_same_weights(weights, wanted):
    assert weights.keys() == wanted.keys()
    for name, weight in weights.items():
        # Adam makes a step of its learning rate of any gradient, however small: what is only noise differs by two.
        difference = (weight - wanted[name]).abs()
        assert difference.mean() < 1e-5 and difference.max() < 2.1 * 2 * LEARNING_RATE, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["fsdp"])
def test_a_rank_without_media_takes_part_in_the_tower_and_adds_no_gradient(two_ranks, tmp_path, backend, family):
    folder = tiny.save_model(tmp_path, family)
    results = two_ranks.run(gradients_and_weights, backend, folder, family)
    wanted_norms, wanted = in_one_process(folder, family)
    for norms, weights in results:
        assert norms == pytest.approx(wanted_norms, rel=1e-4)
        assert_same_weights(weights, wanted)


@pytest.mark.parametrize("backend", ["zero3", "zero2"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_audio"])
def test_so_does_one_on_deepspeed(two_ranks, tmp_path, backend, family):
    folder = tiny.save_model(tmp_path, family)
    results = two_ranks.run(gradients_and_weights, backend, folder, family, timeout=240)
    wanted_norms, wanted = in_one_process(folder, family)
    for norms, weights in results:
        assert norms == pytest.approx(wanted_norms, rel=1e-4)
        assert_same_weights(weights, wanted)


@pytest.mark.parametrize("backend", ["fsdp", "zero3", "zero2"])
def test_frozen_weights_stay_and_are_in_no_optimizer(two_ranks, tmp_path, backend):
    folder = tiny.save_model(tmp_path, "qwen3_vl")
    frozen = ("visual", "model.language_model.layers.0.mlp")
    results = two_ranks.run(gradients_and_weights, backend, folder, "qwen3_vl", True, frozen, timeout=240)
    names = ("model.visual.", "model.language_model.layers.0.mlp.")
    wanted_norms, wanted = in_one_process(folder, "qwen3_vl", names)
    start = dict(live(folder, "qwen3_vl", "padded").named_parameters())
    for norms, weights in results:
        assert norms == pytest.approx(wanted_norms, rel=1e-4)
        assert_same_weights(weights, wanted)
        stayed = {name for name, weight in weights.items() if torch.equal(weight, start[name])}
        assert stayed == {name for name in weights if name.startswith(names)}
