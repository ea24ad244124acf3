"""Adapters: where they go, how they are saved, and what a model is with them merged, off, or as they started."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from lightrft.models.actor import Actor
from lightrft.models.collate import collate
from lightrft.models.loading import empty_model, load_config
from lightrft.models.lora import (
    AdapterReference,
    adapter_config,
    adapter_tensors,
    learned_tensors,
    reference_adapter,
)
from lightrft.models.weights import persistent_tensors
from tests import tiny_models
from tests.adapters import adapted, disturb, live, merged, save_adapter
from tests.tiny_models import random_samples


def log_probs(model):
    with torch.no_grad():
        return Actor(model)(collate(random_samples(3), "padded"), 1.0).log_probs


# Merging


@pytest.mark.parametrize(
    ("rank", "use_rslora", "entry"),
    [
        (1, False, 8.0),  # 4 / 1 x 2 x 1
        (4, False, 2.0),  # 4 / 4 x 2 x 1
        (4, True, 4.0),  # 4 / sqrt(4) x 2 x 1
    ],
)
def test_an_adapter_is_sent_merged_under_plain_names(tmp_path, rank, use_rslora, entry):
    """WGT-05: W = 0, A = [[1, 0], ...], B = [[2, ...], [0, ...]], alpha 4."""
    tiny = tiny_models.qwen2(hidden_size=2, num_attention_heads=1, num_key_value_heads=1, intermediate_size=4)
    folder = tiny_models.save_model(tmp_path, tiny)
    model = live(adapted(folder, lora_rank=rank, lora_alpha=4, use_rslora=use_rslora))
    layer = model.model.layers[1].self_attn.q_proj
    with torch.no_grad():
        for tensor in (layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight):
            tensor.zero_()
        layer.lora_A["default"].weight[0, 0] = 1.0
        layer.lora_B["default"].weight[0, 0] = 2.0
    sent = merged(model, torch.float32)
    assert sent["model.layers.1.self_attn.q_proj.weight"].tolist() == [[entry, 0.0], [0.0, 0.0]]
    assert not layer.base_layer.weight.any()
    plain = empty_model(load_config(folder, "padded"), "causal_lm", torch.float32)
    assert [*sent] == [name for name, _ in persistent_tensors(plain)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "tiny", [tiny_models.qwen2(), tiny_models.llama(), tiny_models.gpt2()], ids=["qwen2", "llama", "gpt2"]
)
def test_merged_weights_are_those_of_peft_to_the_bit(tmp_path, tiny, dtype):
    """WGT-05: biases, ties and the transposed weights of GPT-2 too; the sum is rounded to bf16 once."""
    folder = tiny_models.save_model(tmp_path, tiny)
    model = live(adapted(folder, lora_rank=3, use_rslora=True), dtype)
    disturb(model)
    sent = merged(model, dtype)
    settings = adapter_config(model)
    reference = get_peft_model(tiny_models.random_model(tiny).to(dtype), settings)
    own = dict(adapter_tensors(model))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if ".lora_" in name:
                parameter.copy_(own[name.removeprefix("base_model.model.")])
    expected = dict(persistent_tensors(reference.merge_and_unload()))
    assert sent.keys() == expected.keys()
    assert [name for name in sent if not torch.equal(sent[name], expected[name])] == []
    untouched = dict(persistent_tensors(tiny_models.random_model(tiny).to(dtype)))
    assert len([name for name in sent if not torch.equal(sent[name], untouched[name])]) == len(own) // 2


# The start


def test_only_the_adapter_learns_in_fp32_beside_weights_in_the_compute_dtype(tmp_path):
    loaded = adapted(tiny_models.save_model(tmp_path), lora_rank=2, target_modules=("q_proj", "v_proj"))
    model = live(loaded, torch.bfloat16)
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Two layers of two targets, A and B of each.
    assert len(learning) == 8 and learning.keys() == learned_tensors(model).keys()
    assert {p.dtype for p in learning.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("tiny", [tiny_models.qwen2(), tiny_models.gpt2()], ids=["qwen2", "gpt2"])
def test_a_new_adapter_changes_nothing_and_is_drawn_from_the_seed(tmp_path, tiny):
    """NUM-17: B is 0, A is drawn as peft draws it, uniform within 1 / sqrt(32)."""
    folder = tiny_models.save_model(tmp_path, tiny)
    torch.manual_seed(1)
    first = live(adapted(folder, lora_rank=4))
    torch.manual_seed(2)
    second = live(adapted(folder, lora_rank=4))
    assert torch.equal(log_probs(first), log_probs(live(load_config(folder, "padded"))))
    for (name, a), (_, b) in zip(adapter_tensors(first), adapter_tensors(second), strict=True):
        assert torch.equal(a, b)
        assert 0 < a.abs().max() <= a.shape[1] ** -0.5 if "lora_A" in name else not a.any()


def test_all_linear_means_every_linear_layer_of_the_decoder_and_not_the_head(tmp_path):
    loaded = adapted(tiny_models.save_model(tmp_path, tiny_models.llama()), lora_rank=2)
    parts = {name.rpartition(".")[2] for name in loaded.adapter.config.target_modules}
    assert parts == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(loaded.adapter.config.target_modules) == 2 * 7


def test_a_target_that_matches_nothing_lists_the_linear_layers(tmp_path):
    folder = tiny_models.save_model(tmp_path)
    with pytest.raises(ValueError, match=r"query matches none\. Choose among q_proj, k_proj, .*, down_proj, or set"):
        adapted(folder, lora_rank=2, target_modules=("q_proj", "query"))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "norm"])
def test_an_adapter_on_another_module_is_refused(tmp_path, target):
    folder = tiny_models.save_model(tmp_path)
    with pytest.raises(NotImplementedError, match=f"target_modules names {target}"):
        adapted(folder, lora_rank=2, target_modules=(target,))


def test_dropout_and_quantised_models_are_refused(tmp_path):
    folder = tiny_models.save_model(tmp_path)
    with pytest.raises(NotImplementedError, match=r"not the policy that sampled, .*: lora_dropout=0\.1"):
        adapted(folder, lora_rank=2, lora_dropout=0.1)
    path = tmp_path / "config.json"
    quantised = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    path.write_text(json.dumps(quantised))
    with pytest.raises(NotImplementedError, match="an adapter on a quantised model"):
        adapted(folder, lora_rank=2)


# A peft folder


@pytest.mark.parametrize("tiny", [tiny_models.qwen2(), tiny_models.gpt2()], ids=["qwen2", "gpt2"])
def test_peft_loads_a_written_adapter_with_equal_log_probs(tmp_path, tiny):
    folder = tiny_models.save_model(tmp_path / "model", tiny)
    model = live(adapted(folder, lora_rank=3, lora_alpha=5, use_rslora=True))
    disturb(model)
    written = save_adapter(tmp_path / "adapter", model)
    again = PeftModel.from_pretrained(tiny_models.random_model(tiny), written)
    torch.testing.assert_close(log_probs(again.base_model.model), log_probs(model), atol=1e-6, rtol=0)
    assert not torch.allclose(log_probs(model), log_probs(live(load_config(folder, "padded"))), atol=1e-3)


def test_a_run_starts_from_an_adapter_that_peft_saved(tmp_path):
    """Its rank, scale and layers hold, and its dropout is off."""
    folder = tiny_models.save_model(tmp_path / "model")
    settings = LoraConfig(r=2, lora_alpha=6, lora_dropout=0.1, target_modules=["q_proj", "up_proj"])
    peft_model = get_peft_model(tiny_models.random_model(tiny_models.qwen2()), settings)
    disturb(peft_model)
    peft_model.save_pretrained(tmp_path / "adapter")
    model = live(adapted(folder, lora_path=str(tmp_path / "adapter"))).train()
    peft_model.eval()
    torch.testing.assert_close(log_probs(model), log_probs(peft_model.base_model.model), atol=1e-6, rtol=0)
    assert (adapter_config(model).r, adapter_config(model).lora_alpha) == (2, 6)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]"),
        ({"bias": "all"}, "bias=all"),
        ({"init_lora_weights": "olora"}, "init_lora_weights=olora"),
        ({"target_modules": ["lm_head"]}, "has one on lm_head"),
        ({"target_modules": ["embed_tokens"]}, "has one on model.embed_tokens"),
    ],
)
def test_a_saved_adapter_that_is_not_plain_lora_is_refused(tmp_path, settings, reason):
    untied = tiny_models.llama()
    folder = tiny_models.save_model(tmp_path / "model", untied)
    saved = LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | settings)
    get_peft_model(tiny_models.random_model(untied), saved).save_pretrained(tmp_path / "adapter")
    with pytest.raises(NotImplementedError, match=reason):
        adapted(folder, lora_path=str(tmp_path / "adapter"))


def test_an_adapter_that_does_not_fit_is_refused_by_the_weight_s_name(tmp_path):
    folder = tiny_models.save_model(tmp_path / "model")
    written = save_adapter(tmp_path / "adapter", live(adapted(folder, lora_rank=2, target_modules=("q_proj",))))
    wider = tiny_models.save_model(tmp_path / "wide", tiny_models.qwen2(hidden_size=64))
    name = r"model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight"
    with pytest.raises(ValueError, match=rf"{name} is \(2, 32\) in .*adapter and \(2, 64\) here"):
        adapted(wider, lora_path=written)
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    del weights["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} is absent in"):
        adapted(folder, lora_path=written)


def test_a_folder_without_an_adapter_names_what_is_missing(tmp_path):
    folder = tiny_models.save_model(tmp_path)
    with pytest.raises(ValueError, match=r"has no adapter_config\.json and no adapter_model\.safetensors"):
        adapted(folder, lora_path=folder)


# The reference


def test_the_reference_is_the_actor_without_its_adapter(tmp_path):
    """NUM-17"""
    folder = tiny_models.save_model(tmp_path)
    actor = Actor(live(adapted(folder, lora_rank=2)))
    before = log_probs(actor.model)
    disturb(actor.model)
    trained, flags = log_probs(actor.model), [p.requires_grad for p in actor.parameters()]
    reference = AdapterReference(actor)
    micro = collate(random_samples(3), "padded")
    with torch.no_grad():
        assert torch.equal(reference(micro, 1.0).log_probs, before)
    assert torch.equal(log_probs(actor.model), trained) and not torch.equal(trained, before)
    assert [p.requires_grad for p in actor.parameters()] == flags
    # Moving it or counting its weights leaves the actor alone.
    assert list(reference.parameters()) == list(reference.modules())[1:] == []


def test_the_reference_of_a_loaded_adapter_is_the_model_with_it(tmp_path):
    """NUM-17: KL 0 at step 0; later the actor has moved and the reference has not."""
    folder = tiny_models.save_model(tmp_path / "model")
    start = live(adapted(folder, lora_rank=2))
    disturb(start)
    written = save_adapter(tmp_path / "adapter", start)
    actor = Actor(live(adapted(folder, lora_path=written)))
    reference = AdapterReference(actor)
    micro = collate(random_samples(3), "padded")
    with torch.no_grad():
        expected = reference(micro, 1.0).log_probs
        assert torch.equal(expected, log_probs(actor.model))
        for _, tensor in adapter_tensors(actor.model):
            tensor.mul_(2.0)
        assert torch.equal(reference(micro, 1.0).log_probs, expected)
    assert not torch.equal(log_probs(actor.model), expected)
    names = [name for name, p in actor.model.named_parameters() if p.requires_grad]
    assert names == [name for name, _ in adapter_tensors(actor.model)] and len(names) == 28
    assert [*merged(actor.model, torch.float32)] == [*merged(start, torch.float32)]


def test_without_a_kl_divergence_no_copy_of_the_start_is_kept(tmp_path):
    folder = tiny_models.save_model(tmp_path / "model")
    written = save_adapter(tmp_path / "adapter", live(adapted(folder, lora_rank=2)))
    model = live(adapted(folder, init_kl_coef=0.0, lora_path=written))
    assert not [name for name, _ in model.named_parameters() if ".reference." in name]


def test_an_exception_in_the_reference_leaves_the_adapter_on(tmp_path):
    actor = Actor(live(adapted(tiny_models.save_model(tmp_path), lora_rank=2)))
    disturb(actor.model)
    trained = log_probs(actor.model)
    with pytest.raises(RuntimeError, match="out of memory"), reference_adapter(actor):
        raise RuntimeError("out of memory")
    assert torch.equal(log_probs(actor.model), trained)
