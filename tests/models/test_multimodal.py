"""Models that take media score samples as transformers does, and everything around them knows their parts."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForMultimodalLM, PreTrainedModel

from lightrft.config.arguments import Packing
from lightrft.models.actor import Actor
from lightrft.models.collate import collate, micro_batches
from lightrft.models.critic import Critic
from lightrft.models.freezing import check_freeze_prefix, frozen_names
from lightrft.models.loading import check_same_family, empty_model, load_config, materialize, pretrained_weights
from lightrft.models.lora import decoder_linears, engine_weights
from lightrft.models.multimodal import fillers, position_ids, published_name, suppressed_ids
from lightrft.models.weights import persistent_tensors
from lightrft.types import Experience
from tests import tiny_media_models as tiny
from tests import tiny_models

VISION = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "internvl")
CLIPS = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl")
FAMILIES = (*VISION, "qwen2_audio")
LAYOUTS = ("packed", "padded")
TEMPERATURE = 0.7


def samples_of(family: str) -> list[Experience]:
    """Samples with 1, 3, 0 and 2 items, of several sizes, and with clips where the family has them."""
    kind = "audio" if family == "qwen2_audio" else "image"
    sizes = [(8, 4), (4, 4), (4, 8)] if kind == "image" else [(9,), (4,), (2,)]
    made = [
        [tiny.item(family, kind, 10 * i + j, sizes[j]) for j in range(count)] for i, count in enumerate((1, 3, 0, 2))
    ]
    if family in CLIPS:
        clip = tiny.item(family, "video", 7, (2, 4, 8))
        made += [[clip], [tiny.item(family, "image", 8), clip, tiny.item(family, "video", 9, (2, 4, 8))]]
    responses = ["red", "a", "yes it is", "no", "blue", "12"]
    return [tiny.sample(family, items, responses[i], group=i) for i, items in enumerate(made)]


def live(folder: str, family: str, packing: Packing) -> PreTrainedModel:
    """The model as a strategy makes it."""
    loaded = load_config(folder, packing)
    model = empty_model(loaded, "causal_lm", torch.float32)
    materialize(model, torch.device("cpu"), torch.device("cpu"))
    model.tie_weights()
    weights = pretrained_weights(loaded, "causal_lm", torch.float32)
    with torch.no_grad():
        for name, tensor in persistent_tensors(model):
            tensor.copy_(weights[name])
    return model.eval()


@torch.no_grad()
def alone(model: PreTrainedModel, sample: Experience, suppressed: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies from transformers' own forward of the sample, which finds its positions itself."""
    inputs = {"input_ids": sample.input_ids[None], "attention_mask": torch.ones(1, sample.num_tokens, dtype=torch.long)}
    inputs |= {name: value[None] for name, value in sample.token_inputs.items()} | dict(sample.item_inputs)
    logits = model(**inputs, use_cache=False).logits[0] / TEMPERATURE
    logits[:, list(suppressed)] = float("-inf")
    log_probs = logits.log_softmax(-1)[sample.response_start - 1 : -1]
    entropies = torch.distributions.Categorical(logits=log_probs).entropy()
    return log_probs.gather(-1, sample.input_ids[sample.response_start :, None])[:, 0], entropies


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp(family), family)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_of_a_mixed_batch_equal_transformers_own_of_each_sample(folder, family, layout):
    """DATA-06: 1, 3, 0 and 2 items."""
    samples = samples_of(family)
    own = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    suppressed = suppressed_ids(own.config, tiny.tokenizer())
    actor = Actor(live(folder, family, layout), chunk_size=4, suppressed_ids=suppressed)
    with torch.no_grad():
        output = actor(collate(samples, layout), TEMPERATURE)
    expected = [alone(own, sample, suppressed) for sample in samples]
    torch.testing.assert_close(output.log_probs, torch.cat([e[0] for e in expected]), atol=1e-5, rtol=0)
    torch.testing.assert_close(output.entropy, torch.cat([e[1] for e in expected]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_media_change_the_log_probs_of_their_own_sample_alone(folder, family, layout):
    samples = samples_of(family)
    actor = Actor(live(folder, family, layout))
    name = next(name for name in samples[1].item_inputs if name in ("pixel_values", "input_features"))
    changed = dict(samples[1].item_inputs) | {name: samples[1].item_inputs[name].flip(0) + 1}
    others = [*samples]
    others[1] = replace(samples[1], item_inputs=changed)
    with torch.no_grad():
        before, after = (actor(collate(each, layout), 1.0).log_probs for each in (samples, others))
    lengths = [sample.num_response_tokens for sample in samples]
    moved = [float((a - b).abs().max()) for a, b in zip(before.split(lengths), after.split(lengths), strict=True)]
    assert moved[1] > 1e-3
    assert max(moved[:1] + moved[2:]) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_critic_reads_media_with_the_trunk_of_a_model_with_a_head(folder, family, layout):
    loaded = load_config(folder, layout, "trunk")
    weights = pretrained_weights(loaded, "trunk", torch.float32)
    trunk = empty_model(loaded, "trunk", torch.float32)
    materialize(trunk, torch.device("cpu"), torch.device("cpu"))
    with torch.no_grad():
        for name, tensor in persistent_tensors(trunk):
            tensor.copy_(weights[name])
    critic = Critic(trunk.eval())
    torch.nn.init.normal_(critic.value_head.weight)
    samples = samples_of(family)
    with torch.no_grad():
        values = critic(collate(samples, layout)).values
        alone = [critic(collate([sample], "padded" if layout == "padded" else "packed")).values for sample in samples]
    torch.testing.assert_close(values, torch.cat(alone), atol=1e-4, rtol=0)
    whole = dict(persistent_tensors(live(folder, family, layout)))
    assert all(torch.equal(weight, whole[f"model.{name}"]) for name, weight in persistent_tensors(trunk))


def test_a_filler_changes_no_value_and_has_no_gradient(folder, family):
    """DIST-02: the tower is reached, by gradients that are exactly 0."""
    text = tiny.sample(family, [], "yes it is")
    model = live(folder, family, "packed").train()
    kinds = ["audio"] if family == "qwen2_audio" else ["image", "video"]
    extra = fillers(model.config, kinds)
    actor = Actor(model)
    [(micro, indices, _)] = micro_batches([text], [[0]], "packed", torch.device("cpu"), extra)
    assert micro.lengths == (len(text.action_mask), *[1] * len(extra)) and indices == [0]
    expected = actor(collate([text], "packed"), 1.0).log_probs
    got = actor(micro, 1.0).log_probs
    torch.testing.assert_close(got[: len(expected)], expected, atol=1e-6, rtol=0)
    torch.where(micro.action_mask, got, 0.0).sum().backward()
    towers = {n: p.grad for n, p in model.named_parameters() if "language_model" not in n and "lm_head" not in n}
    # Qwen2-Audio's class freezes its positions; Qwen3-VL's image takes all of its.
    learned = {name: grad for name, grad in towers.items() if model.get_parameter(name).requires_grad}
    assert learned and all(grad is not None and not grad.any() for grad in learned.values())


def test_a_micro_batch_gets_fillers_of_the_kinds_that_it_lacks(folder, family):
    extra = fillers(tiny.config(family), ["audio"] if family == "qwen2_audio" else ["image"])
    samples = samples_of(family)
    batches = list(micro_batches(samples, [[0, 2], [2], []], "padded", torch.device("cpu"), extra))
    assert [len(micro.lengths) for micro, _, _ in batches] == [2, 2, 2]
    [(micro, _, _)] = micro_batches([], [[]], "packed", torch.device("cpu"), extra)
    assert micro.lengths == (1,) and not micro.action_mask.any()


PUBLISHED = {
    "qwen2_vl": ["visual.blocks.0.attn.qkv.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"],
    "qwen2_5_vl": ["visual.blocks.0.attn.qkv.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"],
    "qwen3_vl": ["model.visual.blocks.0.attn.qkv.weight", "model.language_model.norm.weight", "lm_head.weight"],
    "internvl": [
        "vision_tower.encoder.layer.0.attention.q_proj.weight",
        "multi_modal_projector.linear_1.weight",
        "language_model.model.layers.1.mlp.up_proj.weight",
        "language_model.lm_head.weight",
    ],
    "qwen2_audio": [
        "audio_tower.layers.0.self_attn.q_proj.weight",
        "multi_modal_projector.linear.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    ],
}
"""Weights of the folders that the models' makers put out."""


def test_sent_names_are_the_published_ones_one_to_one(folder, family):
    """WGT-06."""
    model = live(folder, family, "packed")
    names = [weight.name for weight in engine_weights(model)]
    assert set(PUBLISHED[family]) <= set(names)
    assert len(set(names)) == len(names) == len(dict(persistent_tensors(model)))
    if Version(transformers.__version__) < Version("5.24") and family == "qwen2_audio":
        return  # It wrote language_model.model.model for language_model.model.
    with safe_open(Path(folder) / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(names)


def test_both_layouts_of_names_load(folder, family, tmp_path):
    """WGT-06: the published one, and transformers' own."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = dict(persistent_tensors(live(folder, family, "packed")))
    save_file(
        {name: tensor.clone() for name, tensor in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    loaded = pretrained_weights(load_config(str(tmp_path), "packed"), "causal_lm", torch.float32)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())


def test_an_adapter_is_on_linear_layers_of_the_decoder_alone(folder, family):
    names = decoder_linears(live(folder, family, "packed"))
    assert len(names) == 2 * 7
    assert all(name.startswith("model.language_model.layers.") for name in names)


def test_frozen_prefixes_are_names_of_the_folder_of_the_model_or_of_its_trunk(folder, family):
    model = live(folder, family, "packed")
    tower = "audio_tower" if family == "qwen2_audio" else "vision_tower" if family == "internvl" else "visual"
    whole = [name for name, _ in model.named_parameters() if name.startswith(f"model.{tower}.")]
    assert frozen_names(model, [tower]) == frozen_names(model, [f"model.{tower}"]) == whole
    trunk = model.base_model
    assert isinstance(trunk, PreTrainedModel)
    assert frozen_names(trunk, [tower]) == [name.removeprefix("model.") for name in whole]
    # Parts are whole: layer 1 is not layer 10, and vis is nothing.
    check_freeze_prefix(model, [tower])
    with pytest.raises(ValueError, match=f"vis begins none. Choose among .*{tower}.*language_model"):
        check_freeze_prefix(model, ["vis"])
    parts = {name.removeprefix("model.").split(".")[0] for name, _ in model.named_parameters()}
    with pytest.raises(ValueError, match="must leave weights to learn"):
        check_freeze_prefix(model, sorted(parts))


# Positions and ids


def test_positions_of_an_image_between_texts():
    """Two pieces high and one wide, after one text token: 1 and 2 on the height's axis; the text goes on at 3."""
    config = tiny.config("qwen2_5_vl")
    ids, inputs = tiny.item("qwen2_5_vl", "image", 0, (4, 2))
    positions = position_ids(config, torch.tensor([*ids, tiny.IDS["a"]]), inputs)
    assert positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 1, 3, 4], [0, 1, 2, 3, 4], [0, 1, 1, 3, 4]]


@pytest.mark.parametrize(("family", "times"), [("qwen2_vl", [0, 1, 2]), ("qwen2_5_vl", [0, 1, 3])])
def test_text_behind_a_clip_starts_after_its_highest_position(family, times):
    """Three frames of one piece: 0, 1 and 2; or, at 0.75 s a frame and 2 positions a second, 0, 1.5 and 3 cut off."""
    ids, inputs = tiny.item(family, "video", 0, (3, 2, 2))
    inputs["second_per_grid_ts"] = torch.tensor([0.75])
    positions = position_ids(tiny.config(family), torch.tensor(ids), inputs)
    behind = 1 + times[-1] + 1
    assert positions.tolist() == [
        [0, 1, 2, 3, 4],
        [0, *(1 + time for time in times), behind],
        [0, 1, 1, 1, behind],
        [0, 1, 1, 1, behind],
    ]


def test_times_of_a_clip_are_cut_off_as_vllm_does_it():
    """2 / 0.3 s a piece is 6.6666665 in fp32, so 3 x 2 x that is below 40; in fp32 it would be 40."""
    ids, inputs = tiny.item("qwen2_5_vl", "video", 0, (4, 2, 2))
    inputs["second_per_grid_ts"] = torch.tensor([2 / 0.3])
    positions = position_ids(tiny.config("qwen2_5_vl"), torch.tensor(ids), inputs)
    assert positions[1].tolist() == [0, 1, 1 + 13, 1 + 26, 1 + 39, 1 + 40]


def test_suppressed_ids_are_placeholders_marks_and_ids_without_a_token(family):
    ids = suppressed_ids(tiny.config(family), tiny.tokenizer())
    unused = set(range(len(tiny.TOKENS), len(tiny.TOKENS) + tiny.NUM_UNUSED))
    marks = {
        "internvl": ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
        "qwen2_audio": ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"],
    }.get(family, ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"])
    assert set(ids) == unused | {tiny.IDS[mark] for mark in marks}


def test_a_text_model_suppresses_nothing_and_has_plain_names_and_positions():
    config = tiny_models.qwen2(vocab_size=40)
    assert suppressed_ids(config, tiny_models.tokenizer()) == ()
    assert published_name(config, "model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
    assert position_ids(config, torch.tensor([4, 5, 6]), {}).tolist() == [0, 1, 2]


def test_models_of_two_families_do_not_share_samples(tmp_path):
    folders = [tiny.save_model(tmp_path / family, family) for family in ("qwen2_vl", "qwen3_vl")]
    first, second = (load_config(folder, "auto") for folder in folders)
    check_same_family(first, first)
    with pytest.raises(ValueError, match=r"of one family, .* is a qwen2_vl, .* a qwen3_vl"):
        check_same_family(first, second)


@pytest.mark.parametrize("attention", ["packed", "padded"])
def test_ragged_attention_is_the_decoders_and_a_towers_is_by_length_or_plain(folder, family, attention):
    model = live(folder, family, attention)
    text = model.config.get_text_config()
    kind = type(model.config.audio_config if family == "qwen2_audio" else model.config.vision_config)
    parts = [part for part in model.modules() if isinstance(getattr(part, "config", None), kind)]
    assert text._attn_implementation == ("varlen" if attention == "packed" else "sdpa")
    assert len(parts) > 1
    plain = family in ("internvl", "qwen2_audio")
    assert {part.config._attn_implementation for part in parts} == {"sdpa" if plain else "by_length_as_flash"}
