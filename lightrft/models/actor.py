"""Actor: the differentiable policy."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.models.log_prob_head import LogProbHead
from lightrft.types import MicroBatch


class ActorOutput(NamedTuple):
    """A tuple, because FSDP2 finds tensors to hook only in containers that PyTorch can flatten."""

    log_probs: Tensor
    """`(N,)` fp32, natural."""
    entropy: Tensor
    """`(N,)` fp32, nats."""


class Actor(nn.Module):
    """A causal language model that returns log-probs of response tokens, the same for packed and padded layouts."""

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_size: int = 192,
        entropy_grad: bool = False,
        suppressed_ids: Sequence[int] = (),
    ) -> None:
        """`suppressed_ids` are those that the engine never draws."""
        super().__init__()
        self.model = model
        self.log_prob_head = LogProbHead(chunk_size, entropy_grad, suppressed_ids)

    def forward(self, micro: MicroBatch, temperature: float) -> ActorOutput:
        """Scores the response tokens at `temperature`, by dividing logits."""
        hidden = self.model.base_model(**micro.model_inputs).last_hidden_state
        predictors = hidden.flatten(0, 1)[micro.response_index]
        lm_head = self.model.get_output_embeddings()
        return ActorOutput(*self.log_prob_head(predictors, lm_head, micro.target_ids, temperature))
