"""ServedModel: a reward model, as a component of the reward in a process of its own."""

import asyncio
import math
from collections.abc import Sequence

import torch

from lightrft.datasets.prompt_ids import tokenize
from lightrft.datasets.reward_text import reward_text
from lightrft.models.collate import micro_batches
from lightrft.models.loading import empty_model, load_tokenizer, materialize, pretrained_weights
from lightrft.models.reward_model import RewardModel, load_classifier, text_sample, unreadable
from lightrft.rewards.records import Fault, Grade, RewardInput
from lightrft.strategy.utils.distributed_util import plan_micro_batches

ROWS_OF_ROUND = 512


class ServedModel:
    """Scores by a sequence classifier with its own tokenizer and chat template.

    Args:
        max_tokens: In a forward; a longer text is alone.

    Raises:
        ValueError: The folder holds no reward model with a tokenizer.
    """

    def __init__(self, pretrain: str, device: torch.device, dtype: torch.dtype, max_tokens: int) -> None:
        self.name = pretrain
        self.rows_of_round = ROWS_OF_ROUND
        self.trouble: str | None = None
        self.device = device
        self.max_tokens = max_tokens
        self.loaded = load_classifier(pretrain, "auto")
        self.tokenizer = load_tokenizer(pretrain)
        model = empty_model(self.loaded, "classifier", dtype)
        weights = pretrained_weights(self.loaded, "classifier", dtype)
        materialize(model, parameter_device=device, buffer_device=device)
        model.load_state_dict(weights)
        self.model = RewardModel(model.eval().requires_grad_(False))

    def check_row(self, sample: RewardInput) -> None:
        """Raises ValueError for messages that the chat template does not take."""
        self._text(sample)

    def grade(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Grade]:
        """One grade for each input, in order; a text that the model cannot read is an error of its row."""
        all_ids = tokenize([self._text(sample) for sample in inputs], self.tokenizer)
        reasons = [unreadable(ids, self.loaded) for ids in all_ids]
        scores = iter(self._scores([ids for ids, reason in zip(all_ids, reasons, strict=True) if reason is None]))
        return [
            _grade(next(scores)) if reason is None else Grade(None, fault=Fault("error", reason)) for reason in reasons
        ]

    def close(self) -> None:
        """The model ends with the process."""

    def _text(self, sample: RewardInput) -> str:
        return reward_text(self.tokenizer, sample.prompt, sample.messages, sample.response)

    @torch.no_grad()
    def _scores(self, all_ids: Sequence[Sequence[int]]) -> list[float]:
        samples = [text_sample(ids) for ids in all_ids]
        lengths = [len(ids) for ids in all_ids]
        plan = plan_micro_batches(lengths, self.max_tokens, len(samples), self.loaded.layout == "padded")
        scores: dict[int, float] = {}
        for micro, indices, _ in micro_batches(samples, plan, self.loaded.layout, self.device):
            scores |= dict(zip(indices, self.model(micro).tolist(), strict=True))
        return [scores[i] for i in range(len(samples))]


def _grade(score: float) -> Grade:
    return Grade(score) if math.isfinite(score) else Grade(None, fault=Fault("error", f"its score is {score}."))
