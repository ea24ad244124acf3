"""Entropy: the tokens at which a policy has a choice."""

from jaxtyping import Float
from torch import Tensor


def high_entropy_threshold(entropies: Float[Tensor, "tokens"], ratio: float) -> float:
    """The least entropy among the `ratio` of tokens with the highest ones; at least one token is.

    Args:
        entropies: Of the kept tokens of all ranks; infinity comes back where there is none.

    Source: Wang et al., "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for
    LLM Reasoning" (2025).
    """
    count = entropies.numel()
    if count == 0:
        return float("inf")
    num_chosen = max(1, round(ratio * count))
    return float(entropies.kthvalue(count - num_chosen + 1).values)
