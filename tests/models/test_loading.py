"""Models are read from their folder with every weight, buffer and tie, or refused with a reason."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, MistralConfig

from lightrft.models.loading import (
    check_context,
    check_tensor_parallel,
    empty_model,
    load_config,
    materialize,
    pretrained_weights,
    stop_token_ids,
)
from lightrft.models.weights import persistent_tensors
from tests import tiny_models

CPU = torch.device("cpu")


@pytest.mark.parametrize("config", [tiny_models.qwen2(), tiny_models.llama(), tiny_models.gpt2()])
def test_an_empty_model_filled_by_name_equals_the_saved_one(tmp_path, config):
    """WGT-02: a tied weight has one name; buffers that no file holds are right."""
    loaded = load_config(tiny_models.save_model(tmp_path, config), "padded")
    weights = pretrained_weights(loaded, "causal_lm", torch.float32)
    model = empty_model(loaded, "causal_lm", torch.float32)
    materialize(model, CPU, CPU)
    model.tie_weights()
    with torch.no_grad():
        for name, target in persistent_tensors(model):
            target.copy_(weights.pop(name))
    assert not weights
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = tiny_models.random_model(config)(ids).logits
    torch.testing.assert_close(model.eval()(ids).logits, expected, atol=1e-6, rtol=0)


def test_auto_packs_plain_causal_models_and_pads_sliding_windows(tmp_path):
    plain = load_config(tiny_models.save_model(tmp_path / "a"), "auto")
    assert (plain.layout, plain.attention) == ("packed", "varlen")
    sliding = tiny_models.qwen2(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    folder = tiny_models.save_model(tmp_path / "b", sliding)
    assert load_config(folder, "auto").layout == "padded"
    assert (load_config(folder, "packed").layout, load_config(folder, "packed").attention) == ("packed", "sdpa")


def test_an_absent_folder_is_named():
    with pytest.raises(ValueError, match="/nowhere/model does not"):
        load_config("/nowhere/model", "auto")


def test_a_folder_without_configuration_is_named(tmp_path):
    with pytest.raises(ValueError, match="must hold a Hugging Face configuration"):
        load_config(str(tmp_path), "auto")


@pytest.mark.parametrize("has_causal_class", [True, False])
def test_an_encoder_is_refused_as_not_causal(tmp_path, has_causal_class):
    """transformers knows a causal class for Bert too, but these weights are not of it."""
    if has_causal_class:
        BertForMaskedLM(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(
            tmp_path
        )
    else:
        (tmp_path / "config.json").write_text('{"model_type": "vit", "architectures": ["ViTModel"]}')
    with pytest.raises(ValueError, match=r"must be a causal language model: .*(BertForMaskedLM|ViTModel)"):
        load_config(str(tmp_path), "auto")


def test_a_model_with_a_window_but_no_layer_types_is_padded(tmp_path):
    MistralConfig(architectures=["MistralForCausalLM"], sliding_window=4096).save_pretrained(tmp_path)
    assert load_config(str(tmp_path), "auto").layout == "padded"


def test_a_folder_that_lacks_a_weight_is_refused_by_its_name(tmp_path):
    folder = tiny_models.save_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.mlp\.up_proj\.weight"):
        pretrained_weights(load_config(folder, "auto"), "causal_lm", torch.float32)


def test_prompt_and_response_beyond_the_context_name_the_numbers():
    with pytest.raises(ValueError, match=r"prompt_max_len=60 \+ generate_max_len=10 = 70 tokens, context 64"):
        check_context(tiny_models.qwen2(), 60, 10)
    check_context(tiny_models.qwen2(), 54, 10)


def test_tensor_parallel_must_divide_the_heads():
    """DIST-04"""
    with pytest.raises(ValueError, match="4 heads, engine_tp_size=3"):
        check_tensor_parallel(tiny_models.qwen2(), 3)
    check_tensor_parallel(tiny_models.qwen2(), 2)


def test_stop_ids_join_tokenizer_and_generation_config(tmp_path):
    folder = tiny_models.save_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert stop_token_ids(tiny_models.tokenizer(), load_config(folder, "auto")) == (1, 7)
    (tmp_path / "generation_config.json").unlink()
    config = load_config(folder, "auto")
    config.hf_config.eos_token_id = [1, 9]
    assert stop_token_ids(tiny_models.tokenizer(), config) == (1, 9)
