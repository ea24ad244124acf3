"""A reward model reads its score at each sample's last token, as transformers does on the sample alone."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Qwen2ForSequenceClassification,
)

from lightrft.models.collate import collate
from lightrft.models.loading import pretrained_weights
from lightrft.models.reward_model import RewardModel, load_classifier
from tests import tiny_models
from tests.tiny_models import random_samples, sample

CONFIGS = {"qwen2": tiny_models.qwen2, "llama": tiny_models.llama, "gpt2": tiny_models.gpt2}


def own_scores(model, samples):
    """What transformers gives each sample alone."""
    with torch.no_grad():
        return torch.stack([model(input_ids=one.input_ids[None]).logits[0, 0] for one in samples])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_scores_equal_those_of_transformers(name, layout):
    model, samples = tiny_models.random_classifier(CONFIGS[name]()), random_samples(5)
    # A response may well end with the pad token.
    samples.append(sample([5, 6], [7, 0, 0]))
    # transformers looks for the last token that is no pad.
    model.config.get_text_config().pad_token_id = None
    expected = own_scores(model, samples)
    scores = RewardModel(model)(collate(samples, layout))
    assert expected.std() > 0.01
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_the_head_computes_in_fp32_on_a_bf16_trunk():
    model = RewardModel(tiny_models.random_classifier(tiny_models.qwen2()).to(torch.bfloat16))
    scores = model(collate(random_samples(2), "padded"))
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())


def test_weights_keep_the_names_that_transformers_gives_them():
    model = tiny_models.random_classifier(tiny_models.qwen2())
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in RewardModel(model).model.named_parameters()] == names


def test_a_folder_without_its_head_is_refused_by_name(tmp_path):
    """transformers would draw the head at random."""
    folder = tiny_models.save_classifier(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"must hold every weight: .* lacks score.weight"):
        pretrained_weights(load_classifier(folder, "auto"), "classifier", torch.float32)


def test_a_new_head_on_a_language_model_starts_at_zero(tmp_path):
    loaded = load_classifier(tiny_models.save_model(tmp_path), "auto", new_head=True)
    weights = pretrained_weights(loaded, "classifier", torch.float32)
    assert torch.equal(weights["score.weight"], torch.zeros(1, 32))
    trunk = tiny_models.random_model(tiny_models.qwen2()).state_dict()
    assert all(torch.equal(weight, trunk[name]) for name, weight in weights.items() if name != "score.weight")


def test_a_new_head_is_not_put_on_a_classifier_that_has_one(tmp_path):
    loaded = load_classifier(tiny_models.save_classifier(tmp_path), "auto", new_head=True)
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    weights = pretrained_weights(loaded, "classifier", torch.float32)
    assert torch.equal(weights["score.weight"], saved.get_parameter("score.weight"))


def test_a_language_model_is_no_reward_model(tmp_path):
    with pytest.raises(ValueError, match=r"must be a sequence classifier .*Qwen2ForCausalLM"):
        load_classifier(tiny_models.save_model(tmp_path), "auto")


def test_a_classifier_with_two_labels_is_refused(tmp_path):
    Qwen2ForSequenceClassification(tiny_models.qwen2(num_labels=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"must have one label: .* num_labels=2"):
        load_classifier(str(tmp_path), "auto")


def test_an_encoder_is_refused(tmp_path):
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must read its label at the last token"):
        load_classifier(str(tmp_path), "auto")
