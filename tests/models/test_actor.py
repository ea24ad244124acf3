"""The actor scores each response token as a plain forward of the sample alone does."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lightrft.models.actor import Actor
from lightrft.models.attention import VARLEN
from lightrft.models.collate import collate
from lightrft.models.loading import load_config
from tests import tiny_models
from tests.tiny_models import random_samples, sample

CONFIGS = {"qwen2": tiny_models.qwen2, "llama": tiny_models.llama, "gpt2": tiny_models.gpt2}
TEMPERATURES = (0.5, 1.0, 1.5)


def with_attention(model, name):
    model.set_attn_implementation(name)
    return model


def alone(model, one, temperature):
    """Log-probs of one sample's response from transformers' own logits."""
    with torch.no_grad():
        logits = model(input_ids=one.input_ids[None], use_cache=False).logits[0]
    log_probs = torch.log_softmax(logits / temperature, -1)
    predicted = log_probs[one.response_start - 1 : -1]
    return predicted.gather(-1, one.input_ids[one.response_start :, None])[:, 0]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout, attention", [("packed", VARLEN), ("packed", "sdpa"), ("padded", "sdpa")])
def test_packed_and_padded_log_probs_equal_each_sample_alone(name, layout, attention):
    """NUM-01, NUM-03: also on a model with absolute positions, at each temperature."""
    model = tiny_models.random_model(CONFIGS[name]())
    samples = random_samples(6)
    for temperature in TEMPERATURES:
        expected = torch.cat([alone(with_attention(model, "sdpa"), s, temperature) for s in samples])
        with_attention(model, attention)
        got = Actor(model)(collate(samples, layout), temperature).log_probs
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_no_grad_and_grad_forwards_are_equal_to_the_bit():
    """NUM-01: ratios before the first update are exactly 1."""
    model = with_attention(tiny_models.random_model(tiny_models.qwen2()), VARLEN).train()
    micro = collate(random_samples(6), "packed")
    actor = Actor(model)
    with torch.no_grad():
        old = actor(micro, 0.7).log_probs
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        assert torch.equal(actor(micro, 0.7).log_probs.detach(), old)


class NextIdModel(nn.Module):
    """Always predicts id + 1: its hidden state is a scaled one-hot of it, its head the identity."""

    def __init__(self, vocabulary):
        super().__init__()
        self.head = nn.Linear(vocabulary, vocabulary, bias=False)
        nn.init.eye_(self.head.weight)
        self.base_model = self

    def forward(self, input_ids, **_):
        hidden = 100.0 * torch.nn.functional.one_hot(input_ids + 1, self.head.in_features).float()
        return type("Output", (), {"last_hidden_state": hidden})

    def get_output_embeddings(self):
        return self.head


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("neighbours", [[], [sample([3, 4, 5], [6, 7, 8, 9])]])
def test_log_prob_t_belongs_to_response_token_t(layout, neighbours):
    """NUM-04: 10, 11 | 12, 13 under a model that predicts id + 1 gives exactly two values, both near 0."""
    base = NextIdModel(20)
    actor = Actor.__new__(Actor)
    nn.Module.__init__(actor)
    actor.model = base
    actor.log_prob_head = Actor(tiny_models.random_model(tiny_models.qwen2())).log_prob_head
    micro = collate([sample([10, 11], [12, 13]), *neighbours], layout)
    first = actor(micro, 1.0).log_probs.split(micro.lengths)[0]
    assert first.shape == (2,)
    assert (first > -1e-3).all()


def test_temperature_divides_logits():
    """NUM-01: logits [2, 1, 0]: log softmax of [4, 2, 0] is -0.1429 at T = 0.5; at T = 1 it is -0.4076."""
    model = NextIdModel(3)
    head = Actor(tiny_models.random_model(tiny_models.qwen2())).log_prob_head
    hidden = torch.tensor([[2.0, 1.0, 0.0]])
    for temperature, expected in ((0.5, -0.1429), (1.0, -0.4076)):
        log_probs, _ = head(hidden, model.head, torch.tensor([0]), temperature)
        assert log_probs.item() == pytest.approx(expected, abs=1e-4)


def test_a_longer_neighbour_changes_no_log_prob():
    """NUM-03: padding a row by five more columns moves nothing."""
    model = with_attention(tiny_models.random_model(tiny_models.gpt2()), "sdpa")
    short, long = sample([5, 6], [7, 8]), sample([9, 3, 4], [5, 6, 7, 8, 2, 3])
    got = Actor(model)(collate([short, long], "padded"), 1.0).log_probs[:2]
    torch.testing.assert_close(got, alone(model, short, 1.0), atol=1e-5, rtol=0)


def test_a_pad_id_inside_prompt_or_response_stays_attended():
    """NUM-14: the mask comes from lengths, so an id equal to pad and eos is an ordinary token."""
    model = with_attention(tiny_models.random_model(tiny_models.qwen2()), "sdpa")
    odd, long = sample([5, 0, 6], [5, 6, 0]), sample([3] * 5, [4] * 4)
    micro = collate([odd, long], "padded")
    assert micro.model_inputs["attention_mask"].tolist() == [[1] * 6 + [0] * 3, [1] * 9]
    assert micro.action_mask[:3].tolist() == [True] * 3
    got = Actor(model)(micro, 1.0).log_probs[:3]
    torch.testing.assert_close(got, alone(model, odd, 1.0), atol=1e-5, rtol=0)


def test_a_model_saved_with_dropout_scores_the_same_twice_while_training(tmp_path):
    """NUM-17: with dropout 0.1 in its configuration, ratios would otherwise not start at 1."""
    for config in (tiny_models.qwen2(attention_dropout=0.1), tiny_models.gpt2(resid_pdrop=0.1, attn_pdrop=0.1)):
        folder = tiny_models.save_model(tmp_path / config.model_type, config)
        loaded = load_config(folder, "padded")
        model = AutoModelForCausalLM.from_pretrained(folder, config=loaded.hf_config).train()
        micro = collate(random_samples(4), "padded")
        with torch.no_grad():
            assert torch.equal(Actor(model)(micro, 1.0).log_probs, Actor(model)(micro, 1.0).log_probs)
