"""ScalarHead: one number of a hidden state."""

from torch import Tensor, nn


class ScalarHead(nn.Linear):
    """Hidden state `(N, H)` to a number `(N, 1)`, in fp32 whatever the trunk computes in."""

    def forward(self, input: Tensor) -> Tensor:
        # DeepSpeed computes with bf16 weights, FSDP2 keeps these as they are stored.
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(input.float(), self.weight.float(), bias)
