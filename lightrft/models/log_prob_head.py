"""LogProbHead: log-probabilities of given tokens, without all logits in memory at once."""

from torch import Tensor, nn

from lightrft.ops.log_probs import token_log_probs


class LogProbHead(nn.Module):
    """Scores response tokens with the LM head's own weight, which stays where the language model keeps it.

    It must run inside the forward of the module that owns the weight: only there has FSDP2 gathered it.
    """

    def __init__(self, chunk_size: int, entropy_grad: bool) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        self.entropy_grad = entropy_grad

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
        )
