"""ZeRO-3 gathers and reduces a decoder layer as a whole, on two real ranks."""

from contextlib import ExitStack
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lightrft.models.actor import Actor
from lightrft.models.collate import collate
from lightrft.models.loading import LoadedConfig, empty_model, load_config, with_adapter
from lightrft.strategy.deepspeed import library, settings
from lightrft.strategy.deepspeed.settings import whole_layers
from lightrft.strategy.roles import decoder_layers, hf_model_of
from tests import tiny_media_models, tiny_models
from tests.distributed.runs import strategy_on
from tests.tiny_models import random_samples

LAYERS = 3
MODELS = {
    "plain": {},
    "frozen embedding": {"freeze_prefix": ("model.embed_tokens",)},
    "adapter": {"lora_rank": 4, "lora_alpha": 8},
}
FLAGS = {"optimizer": {"lr_scheduler": "constant", "lr_warmup_steps": 0, "max_norm": 0.0}}
"""The norm's sum would be in another order."""


def save(folder):
    return tiny_models.save_model(folder, tiny_models.qwen2(num_hidden_layers=LAYERS, tie_word_embeddings=False))


def call_by_name(layer, hidden_states, **others):
    return nn.Module.__call__(layer, hidden_states=hidden_states, **others)


def trained(folder, model_flags, is_whole, by_name=False):
    """Weights after two steps of two micro-batches, which layers were whole, and how often weights were fetched.

    Args:
        by_name: The model calls `layer(hidden_states=...)`, as some do.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.utils import z3_leaf_module

    flags = FLAGS | {"model": {"gradient_checkpointing": True} | model_flags}
    with ExitStack() as patches, strategy_on("zero3", folder, **flags) as strategy:
        if not is_whole:
            patches.enter_context(mock.patch.object(library, "keep_whole", lambda role, layers: None))
        if by_name:
            patches.enter_context(mock.patch.object(GradientCheckpointingLayer, "__call__", call_by_name))
        loaded = with_adapter(load_config(folder, "auto"), strategy.config)
        model = strategy.prepare_model(loaded, "causal_lm", Actor, trainable=True)
        role = strategy.prepare_optimizer("actor", model, 1e-2, 100)
        whole = [z3_leaf_module(layer) for layer in decoder_layers(hf_model_of(model))]
        for _ in range(2):
            total = torch.zeros(())
            for i, sample in enumerate(random_samples(2, seed=strategy.rank)):
                loss = -role.model(collate([sample], "packed"), 1.0).log_probs.mean()
                strategy.backward(loss, role, is_last=i == 1)
                total += loss.detach()
            strategy.optimizer_step(role, total)
        left = len(parameter_offload.FWD_MODULE_STACK)
        weights = {name: w.clone() for name, w in strategy.named_weights(role.model, torch.float32)}
        fetch = PartitionedParameterCoordinator.fetch_sub_module
        counting = mock.patch.object(
            PartitionedParameterCoordinator, "fetch_sub_module", autospec=True, side_effect=fetch
        )
        with counting as fetches, torch.no_grad():
            role.model(collate(random_samples(1), "packed"), 1.0)
        return weights, whole, fetches.call_count, left


@pytest.mark.parametrize("name", MODELS)
def test_layers_as_a_whole_learn_the_same(two_ranks, tmp_path, name):
    """A layer whose input has no gradient keeps its hooks: DeepSpeed would reduce its gradients before they are there.

    Without hooks in between, autograd sums the gradients of q, k and v in another order. A gradient that is lost or
    counted twice moves weights by the learning rate, 0.01. That of a key's bias is all but 0, and Adam makes such noise
    as large as any gradient.
    """
    folder = save(tmp_path)
    for apart, together in zip(
        two_ranks.run(trained, folder, MODELS[name], False),
        two_ranks.run(trained, folder, MODELS[name], True),
        strict=True,
    ):
        assert apart[1] == [False] * LAYERS and together[1] == [name == "plain", True, True]
        assert apart[0].keys() == together[0].keys()
        for weight, values in apart[0].items():
            bound = 1e-3 if weight.endswith("k_proj.bias") else 5e-5
            assert (together[0][weight] - values).abs().max() < bound, weight


def test_a_forward_fetches_a_layers_weights_once(two_ranks, tmp_path):
    """Beside the layers there are embedding, norm, head, and what holds them; a layer has a dozen modules.

    DeepSpeed's stack of modules keeps those whose recomputation is cut short, for ever: a layer's own parts, and from
    transformers 5.24 on not the layer.
    """
    folder = save(tmp_path)
    [_, _, fetched_apart, left_apart], _ = two_ranks.run(trained, folder, {}, False)
    [_, _, fetched, left], _ = two_ranks.run(trained, folder, {}, True)
    assert fetched_apart - fetched >= 9 * LAYERS and fetched <= LAYERS + 8
    assert left < left_apart / 2


def test_layers_that_are_given_their_input_by_name_learn_too(two_ranks, tmp_path):
    folder = save(tmp_path)
    by_position = two_ranks.run(trained, folder, {}, True)
    for (expected, *_), (weights, *_) in zip(by_position, two_ranks.run(trained, folder, {}, True, True), strict=True):
        assert max((weights[name] - expected[name]).abs().max().item() for name in expected) < 5e-5


def run_a_layer_twice(folder):
    with strategy_on("zero3", folder, **FLAGS) as strategy:
        model = strategy.prepare_model(load_config(folder, "auto"), "causal_lm", Actor, trainable=True)
        decoder = hf_model_of(model).model
        decoder.layers.append(decoder.layers[0])
        decoder.config.layer_types.append(decoder.config.layer_types[0])
        decoder.config.num_hidden_layers += 1
        role = strategy.prepare_optimizer("actor", model, 1e-2, 100)
        with pytest.raises(NotImplementedError, match="runs one of its layers, a Qwen2DecoderLayer, more than once"):
            role.model(collate(random_samples(1), "packed"), 1.0)


def test_a_model_that_runs_a_layer_twice_is_refused(two_ranks, tmp_path):
    """Its gradients would be reduced after the layer's last pass, without those of the first."""
    two_ranks.run(run_a_layer_twice, save(tmp_path))


def test_layers_that_share_weights_stay_apart():
    model = tiny_models.random_model(tiny_models.qwen2(num_hidden_layers=LAYERS))
    model.model.layers[2].mlp = model.model.layers[0].mlp
    assert whole_layers(model) == [model.model.layers[1]]


def coming_layers(folder):
    """Of each layer as it starts, and of the one behind it: the states of its largest matrices."""
    found = []
    with mock.patch.object(settings, "PREFETCH_BUCKET", 1), strategy_on("zero3", folder, **FLAGS) as strategy:
        model = strategy.prepare_model(load_config(folder, "auto"), "causal_lm", Actor, trainable=True)
        role = strategy.prepare_optimizer("actor", model, 1e-2, 100)
        layers = decoder_layers(hf_model_of(model))
        # DeepSpeed looks ahead once it has seen a pass, and has been told to note one.
        for _ in range(3):
            found.clear()
            hooks = [
                layer.register_forward_pre_hook(lambda *_, next=following: found.append(states(next)))
                for layer, following in pairwise(layers)
            ]
            with torch.no_grad():
                role.model(collate(random_samples(1), "packed"), 1.0)
            for hook in hooks:
                hook.remove()
    return found


def states(layer):
    return {weight.ds_status.name for weight in layer.mlp.parameters()}


def test_while_a_layer_computes_all_of_the_next_one_comes(two_ranks, tmp_path):
    folder = save(tmp_path)
    for found in two_ranks.run(coming_layers, folder):
        assert len(found) == LAYERS - 1 and all(seen <= {"INFLIGHT", "AVAILABLE"} for seen in found)


def test_a_frozen_role_is_whole_and_a_tower_is_not():
    model = tiny_models.qwen2(num_hidden_layers=LAYERS)
    frozen = tiny_models.random_model(model).requires_grad_(False)
    assert whole_layers(frozen) == list(frozen.model.layers)
    seeing = empty_model(
        LoadedConfig("model", tiny_media_models.config("qwen2_5_vl"), "packed", "sdpa"), "causal_lm", torch.float32
    )
    assert whole_layers(seeing) == list(seeing.model.language_model.layers)
