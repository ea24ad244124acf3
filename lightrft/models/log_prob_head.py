"""LogProbHead: log-probabilities of given tokens, without all logits in memory at once."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightrft.ops.log_probs import token_log_probs


class LogProbHead(nn.Module):
    """Scores response tokens with the LM head's own weight, which stays where the language model keeps it.

    It must run inside the forward of the module that owns the weight: only there has FSDP2 gathered it.
    """

    def __init__(self, chunk_size: int, entropy_grad: bool, suppressed_ids: Sequence[int] = ()) -> None:
        """`suppressed_ids` have probability 0."""
        super().__init__()
        self.chunk_size = chunk_size
        self.entropy_grad = entropy_grad
        # Roles are built on the meta device, and this has values.
        ids = torch.tensor(suppressed_ids, dtype=torch.long, device="cpu") if suppressed_ids else None
        self.suppressed_ids: Tensor | None
        self.register_buffer("suppressed_ids", ids, persistent=False)

    def forward(self, hidden: Tensor, lm_head: nn.Linear, target_ids: Tensor, temperature: float) -> tuple:
        """Log-probs and entropies in nats, each `(N,)` fp32, of `target_ids (N,)` given `hidden (N, H)`."""
        return token_log_probs(
            hidden,
            lm_head.weight,
            target_ids,
            temperature,
            self.chunk_size,
            bias=lm_head.bias,
            with_entropy_grad=self.entropy_grad,
            suppressed_ids=self.suppressed_ids,
        )
