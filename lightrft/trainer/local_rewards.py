"""LocalRewardModels: the reward models of a run, which score samples on the run's own devices."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lightrft.config import Config
from lightrft.config.reward_models import reward_folders
from lightrft.datasets.prompt_ids import tokenize
from lightrft.datasets.reward_text import reward_text
from lightrft.models.collate import micro_batches
from lightrft.models.loading import LoadedConfig, load_tokenizer
from lightrft.models.reward_model import RewardModel, load_classifier, text_sample, unreadable
from lightrft.rewards.builtin import REWARDS
from lightrft.rewards.judge import JudgeSource
from lightrft.rewards.records import RESERVED_COMPONENTS, Fault, Grade
from lightrft.rewards.remote import RemoteRewardSource
from lightrft.rewards.rules import RULES
from lightrft.strategy.strategy_base import Plan, StrategyBase
from lightrft.types import Experience, PromptExample
from lightrft.utils.logging import get_logger

logger = get_logger(__name__)

Reading: TypeAlias = list[int] | Fault
"""Ids of a sample's text, or why there are none."""


@dataclass(frozen=True)
class LoadedRewardModel:
    """What a reward model's folder says, and its own tokenizer."""

    name: str
    model: LoadedConfig
    tokenizer: PreTrainedTokenizerBase


def load_reward_models(config: Config) -> list[LoadedRewardModel]:
    """What --reward_pretrain names; weights are not read yet.

    Raises:
        ValueError: A name is taken, or a folder holds no reward model with a tokenizer.
    """
    taken = [*RESERVED_COMPONENTS, *REWARDS, *RULES, RemoteRewardSource.name, JudgeSource.name]
    found = []
    for name, folder in reward_folders(config.reward.reward_pretrain).items():
        if name in taken:
            raise ValueError(
                f"reward_pretrain must give a model a name of its own: {name} is another component's or metric's. "
                "Change it."
            )
        try:
            loaded = LoadedRewardModel(name, load_classifier(folder, config.model.packing), load_tokenizer(folder))
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"reward_pretrain {name}: {error}") from error
        found.append(loaded)
    return found


def check_conversations(reward_models: Sequence[LoadedRewardModel], examples: Iterable[PromptExample]) -> None:
    """Raises ValueError where a chat template does not take the roles of some prompt and an answer."""
    by_roles = {
        tuple(message["role"] for message in example.messages): example
        for example in examples
        if example.messages is not None
    }
    for loaded in reward_models:
        for example in by_roles.values():
            try:
                reward_text(loaded.tokenizer, example.prompt, example.messages, "")
            except ValueError as error:
                raise ValueError(f"reward_pretrain {loaded.name}, row {example.row}: {error}") from error


class LocalRewardModels:
    """Scores by sequence classifiers, on the device only while they score. Every rank has the same, and calls alike.

    Args:
        config: All flags.
        strategy: Shards the models.
        loaded: In the order in which they score.
        observe: Is told that a model has scored and is still on the device.
    """

    def __init__(
        self,
        config: Config,
        strategy: StrategyBase,
        loaded: Sequence[LoadedRewardModel],
        observe: Callable[[str], None] = lambda event: None,
    ) -> None:
        self.strategy = strategy
        self.loaded = {one.name: one for one in loaded}
        self.all_at_once = config.reward.reward_residency == "all"
        self.observe = observe
        self.models: dict[str, nn.Module] = {
            one.name: strategy.prepare_model(one.model, "classifier", RewardModel, trainable=False) for one in loaded
        }
        without = [one.name for one in loaded if one.tokenizer.chat_template is None]
        if without and config.data.apply_chat_template and strategy.is_rank_0:
            logger.warning("no chat template of their own, so they read the actor's: %s", ", ".join(without))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.loaded)

    def grade(self, samples: Sequence[Experience], rows: Mapping[str, Sequence[int]]) -> dict[str, list[Grade]]:
        """A grade for each of this rank's rows. Every rank must call it, also one without any.

        Args:
            samples: This rank's.
            rows: Indices of the samples that each model is to score; none for a model that is not named.
        """
        readings: dict[str, list[Reading]] = {}
        with self.strategy.collectives.collect("reading for reward models"):
            readings = {
                name: self._read(loaded, [samples[i] for i in rows.get(name, ())])
                for name, loaded in self.loaded.items()
            }
        texts = {name: [text_sample(r) for r in of if not isinstance(r, Fault)] for name, of in readings.items()}
        plans = {name: self._plan(name, texts[name]) for name in self.names}
        # A model that no rank has a text for stays where it is.
        scores = self._scores(texts, {name: plan for name, plan in plans.items() if plan})
        given = {name: map(_grade, scores.get(name, [])) for name in self.names}
        return {
            name: [Grade(None, fault=r) if isinstance(r, Fault) else next(given[name]) for r in of]
            for name, of in readings.items()
        }

    def _read(self, loaded: LoadedRewardModel, samples: Sequence[Experience]) -> list[Reading]:
        """What the model reads of each sample."""
        texts = [_text(loaded, sample) for sample in samples]
        ids = iter(tokenize([text for text in texts if isinstance(text, str)], loaded.tokenizer))
        return [_fitting(loaded, next(ids)) if isinstance(text, str) else text for text in texts]

    def _plan(self, name: str, texts: Sequence[Experience]) -> Plan:
        return self.strategy.agree_plan(texts, self.loaded[name].model.layout == "padded")

    def _scores(self, texts: Mapping[str, Sequence[Experience]], plans: Mapping[str, Plan]) -> dict[str, list[float]]:
        """All models come to the device and each leaves after its turn, or each comes and leaves."""
        scores = {}
        with ExitStack() as phase:
            turns = {name: phase.enter_context(ExitStack()) for name in plans}
            if self.all_at_once:
                for name, turn in turns.items():
                    turn.enter_context(self.strategy.on_device(self.models[name]))
            for name, plan in plans.items():
                with turns[name] as turn:
                    if not self.all_at_once:
                        turn.enter_context(self.strategy.on_device(self.models[name]))
                    scores[name] = self._score(name, texts[name], plan)
                    self.observe(f"{name} scored")
        return scores

    def _score(self, name: str, texts: Sequence[Experience], plan: Plan) -> list[float]:
        model, layout = self.models[name], self.loaded[name].model.layout
        scores: dict[int, float] = {}
        for micro, indices, _ in micro_batches(texts, plan, layout, self.strategy.device):
            with torch.no_grad(), self.strategy.waiting(f"{name} forward"):
                found = model(micro)
            scores |= dict(zip(indices, found[: len(indices)].tolist(), strict=True))
        return [scores[i] for i in range(len(texts))]


def _text(loaded: LoadedRewardModel, sample: Experience) -> str | Fault:
    example = sample.example
    try:
        return reward_text(loaded.tokenizer, example.prompt, example.messages, sample.response)
    except ValueError as error:
        return Fault("error", str(error))


def _fitting(loaded: LoadedRewardModel, ids: list[int]) -> Reading:
    reason = unreadable(ids, loaded.model)
    return ids if reason is None else Fault("error", reason)


def _grade(score: float) -> Grade:
    if math.isfinite(score):
        return Grade(score)
    return Grade(None, fault=Fault("error", f"a score must be finite: got {score}. Choose another model."))
