"""PretrainingTexts: what an optimizer step reads besides its samples, so that the actor does not forget (PPO-ptx)."""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from lightrft.models.multimodal import position_ids
from lightrft.types import Experience, PromptExample


class PretrainingTexts:
    """Texts as samples whose every token but the first is a response, in random batches.

    Source: Ouyang et al., "Training language models to follow instructions with human feedback" (2022), eq. 2.
    """

    def __init__(self, texts: Sequence[list[int]], hf_config: PretrainedConfig) -> None:
        self.texts = texts
        self.hf_config = hf_config

    def rows(self, size: int, seed: tuple[int, ...]) -> list[int]:
        """At most `size` rows of one batch, the same on every rank.

        Args:
            size: Texts of a batch, over all ranks.
            seed: What the choice depends on.
        """
        generator = torch.Generator().manual_seed(hash(seed) % 2**63)  # Equal everywhere, for a tuple of ints.
        return torch.randperm(len(self.texts), generator=generator).tolist()[:size]

    def sample(self, row: int) -> Experience:
        ids = self.texts[row]
        input_ids = torch.tensor(ids)
        return Experience(
            group=row,
            index=0,
            example=PromptExample(row=row, prompt="", prompt_ids=ids[:1]),
            response="",
            input_ids=input_ids,
            position_ids=position_ids(self.hf_config, input_ids, {}),
            response_start=1,
            action_mask=torch.ones(len(ids) - 1, dtype=torch.bool),
            finish_reason="stop",
        )
