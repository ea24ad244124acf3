"""Suppression: ids that vLLM never draws, and whose probability is 0 in the log-probs that it gives."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.strategy.vllm_utils.library import logits_layers


class Suppression:
    """Sets logits to minus infinity where the model makes them, in front of every sampler.

    A `logit_bias` of vLLM's requests ends at -100, takes 1024 ids at most, and is sent with each request.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Raises NotImplementedError where the logits of the model do not come from one place."""
        found = logits_layers(model)
        if len(found) != 1:
            raise NotImplementedError(
                f"vLLM's model must make its logits in one place: {type(model).__name__} has {len(found)}. "
                "Set --engine_type torch."
            )
        self._device = device
        self._vocab_size = found[0].org_vocab_size
        self._ids: Tensor | None = None
        found[0].register_forward_hook(self._suppress)

    def set(self, ids: Sequence[int]) -> None:
        """Those of all responses from now on."""
        self._ids = torch.tensor(ids, dtype=torch.long, device=self._device) if ids else None

    def _suppress(self, module: nn.Module, args: Any, logits: Tensor | None) -> None:
        # A rank that does not sample has no logits.
        if self._ids is not None and logits is not None:
            assert logits.shape[-1] == self._vocab_size, "logits are of the whole vocabulary"
            logits.index_fill_(-1, self._ids, float("-inf"))
