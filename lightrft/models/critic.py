"""Critic: the value of each state of a response."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.models.scalar_head import ScalarHead
from lightrft.types import MicroBatch


class CriticOutput(NamedTuple):
    """A tuple, because FSDP2 finds tensors to hook only in containers that PyTorch can flatten."""

    values: Tensor
    """`(N,)` fp32: the value before each response token, at positions prompt_len - 1 .. T - 2."""
    bootstrap_values: Tensor
    """`(B,)` fp32: the value after the last token, at position T - 1."""


class ValueHead(ScalarHead):
    """Hidden state `(N, H)` to value `(N, 1)`; starts at 0 everywhere."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class Critic(nn.Module):
    """A trunk without LM head, and a value head."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.value_head = ValueHead(model.config.get_text_config().hidden_size)

    def forward(self, micro: MicroBatch) -> CriticOutput:
        hidden = self.model(**micro.model_inputs).last_hidden_state.flatten(0, 1)
        index = torch.cat([micro.response_index, micro.last_index])
        values = self.value_head(hidden[index]).squeeze(-1)
        num_tokens = len(micro.response_index)
        # FSDP2 hooks what a module returns, and warns of views.
        return CriticOutput(values[:num_tokens].clone(), values[num_tokens:].clone())
