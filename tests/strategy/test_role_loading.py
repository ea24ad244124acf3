"""How a role is made from a pretrained model, before it has weights."""

import warnings

import pytest
import torch
from torch import nn

from lightrft.config import Config, DataConfig, ModelConfig
from lightrft.models.loading import load_config
from lightrft.strategy.utils.role_loading import empty_role
from tests import tiny_models


@pytest.mark.parametrize(("trainable", "checkpointing"), [(True, True), (True, False), (False, True)])
def test_layers_are_checkpointed_where_a_role_trains_and_without_a_warning(tmp_path, trainable, checkpointing):
    loaded = load_config(tiny_models.save_model(tmp_path), "auto")
    config = Config(ModelConfig(loaded.pretrain, gradient_checkpointing=checkpointing), DataConfig("data"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        role = empty_role(
            config, loaded, "causal_lm", torch.float32, lambda model: nn.ModuleDict({"m": model}), trainable
        )
    layers = role["m"].model.layers
    assert {layer.gradient_checkpointing for layer in layers} == {trainable and checkpointing}
    # Re-entrant checkpointing has no gradient where a layer's input needs none, as the first one's.
    assert all(
        layer._gradient_checkpointing_func.keywords == {"use_reentrant": False}
        for layer in layers
        if layer.gradient_checkpointing
    )
