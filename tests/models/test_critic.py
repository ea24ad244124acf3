"""The critic's values stand before each response token, and one more after the last."""

import torch
from transformers import AutoModel

from lightrft.models.collate import collate
from lightrft.models.critic import Critic
from tests import tiny_models
from tests.tiny_models import random_samples


def random_critic():
    torch.manual_seed(0)
    trunk = AutoModel.from_config(tiny_models.qwen2(), attn_implementation="sdpa")
    critic = Critic(trunk)
    torch.nn.init.normal_(critic.value_head.weight)
    return critic


def test_values_are_zero_at_first():
    critic = Critic(AutoModel.from_config(tiny_models.qwen2()))
    output = critic(collate(random_samples(3), "padded"))
    assert torch.equal(output.values, torch.zeros_like(output.values))
    assert torch.equal(output.bootstrap_values, torch.zeros(3))


def test_values_stand_at_prompt_end_to_one_before_the_last_token():
    critic, samples = random_critic(), random_samples(4)
    output = critic(collate(samples, "padded"))
    for one, values, bootstrap in zip(
        samples, output.values.split([s.num_response_tokens for s in samples]), output.bootstrap_values, strict=True
    ):
        hidden = critic.model(input_ids=one.input_ids[None]).last_hidden_state[0]
        every = critic.value_head(hidden)[:, 0]
        torch.testing.assert_close(values, every[one.response_start - 1 : -1], atol=1e-5, rtol=0)
        torch.testing.assert_close(bootstrap, every[-1], atol=1e-5, rtol=0)


def test_no_lm_head_is_kept():
    assert not any("lm_head" in name for name, _ in random_critic().named_parameters())


def test_the_head_computes_in_fp32_on_a_bf16_trunk():
    critic = random_critic()
    critic.model.to(torch.bfloat16)
    assert critic(collate(random_samples(2), "padded")).values.dtype == torch.float32
