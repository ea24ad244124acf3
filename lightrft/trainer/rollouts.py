"""Rollouts: samples of prompts, drawn by the engine, dealt over the ranks, and given to the reward engine."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lightrft.config import Config
from lightrft.models.loading import LoadedConfig
from lightrft.models.multimodal import position_ids
from lightrft.rewards.records import RewardOutput
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.advantages import without_loss
from lightrft.trainer.dynamic_sampling import chosen_groups, has_variance
from lightrft.trainer.media_feed import MediaFeed, NumberedPrompt
from lightrft.trainer.phases import PhaseClock
from lightrft.trainer.reward_engine import RewardComputationEngine
from lightrft.types import Experience, GenerationOutput, PromptExample, SamplingParams
from lightrft.utils.means import Means
from lightrft.utils.sampling_key import sampling_key

FurtherPrompts: TypeAlias = Callable[[int], Sequence[NumberedPrompt] | None]
"""This rank's prompts of a step's next batch, by the number of batches before it; None on all ranks for no more."""


class Rollouts:
    """Steps 1 to 3 of an iteration, and the evaluation's samples. Every rank must call what draws or gets rewards."""

    def __init__(
        self,
        config: Config,
        strategy: StrategyBase,
        actor: nn.Module,
        reward_engine: RewardComputationEngine,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        model: LoadedConfig,
        media: MediaFeed,
        phase: PhaseClock,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.actor = actor
        self.reward_engine = reward_engine
        self.tokenizer = tokenizer
        self.model = model
        self.media = media
        self.phase = phase
        rollout = config.rollout
        self.params = SamplingParams(
            max_new_tokens=rollout.generate_max_len,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=stop_token_ids,
            stop=rollout.stop,
            first_token_temperature=rollout.first_token_temperature if rollout.use_fire else None,
            suppressed_ids=model.suppressed_ids,
        )

    def rollout(
        self, batches: Sequence[Sequence[NumberedPrompt]], step: int, num_samples: int, params: SamplingParams
    ) -> list[Experience]:
        """Samples that nothing is learned from, submitted to the reward engine; ordered, and dealt by their tokens."""
        groups: list[list[Experience]] = []
        with self.engine_phase():
            for prompts in self.media.batches(batches):
                made = self.generate(prompts, step, num_samples, params)
                groups += [[replace(s, token_inputs={}, item_inputs={}) for s in group] for group in made]
        return self.submitted(groups)

    def training_groups(self, prompts: Sequence[NumberedPrompt], step: int) -> list[list[Experience]]:
        """Samples of a step's only batch of prompts."""
        with self.engine_phase():
            return self.generate_for_training(prompts, step)

    def dynamic_rollout(
        self, prompts: Sequence[NumberedPrompt], step: int, further_prompts: FurtherPrompts, means: Means
    ) -> list[Experience]:
        """Rewarded samples of groups whose rewards differ, as many groups as a rollout has; dealt by their tokens.

        Batches of prompts are drawn until there are enough, on all ranks alike, or until there may be no more; groups
        of equal rewards then fill what is missing.
        """
        groups: list[list[Experience]] = []
        num_wanted = self.config.rollout.rollout_batch_size
        tries, num_drawn, num_kept = 0, 0, 0
        batch: Sequence[NumberedPrompt] | None = prompts
        with self.engine_phase():
            while batch is not None:
                groups += self.rewarded_groups(self.generate_for_training(batch, step))
                tries += 1
                local = [len(groups), sum(map(self.is_kept, groups))]
                num_drawn, num_kept = map(int, self.strategy.collectives.all_reduce_sum(local))
                is_over = num_kept >= num_wanted or tries == self.config.rollout.dynamic_sampling_tries
                batch = None if is_over else further_prompts(tries)
        counts = {"tries": tries, "drawn": num_drawn, "kept": num_kept, "filled": max(0, num_wanted - num_kept)}
        for name, count in counts.items():
            means.add(f"dynamic_sampling/{name}", count, 1)
        return [sample for group in self.strategy.dealer.balance_groups(self.chosen(groups)) for sample in group]

    def chosen(self, groups: list[list[Experience]]) -> list[list[Experience]]:
        """This rank's part of the groups that the step trains on. Every rank must call it."""
        local = {group[0].group: self.is_kept(group) for group in groups}
        everywhere: dict[int, bool] = {}
        for part in self.strategy.collectives.all_gather_objects(local):
            everywhere |= part
        kept = [name for name, is_kept in everywhere.items() if is_kept]
        chosen = chosen_groups(kept, everywhere.keys() - set(kept), self.config.rollout.rollout_batch_size)
        return [group for group in groups if group[0].group in chosen]

    def is_kept(self, group: Sequence[Experience]) -> bool:
        return has_variance([sample for sample in group if not self.is_greedy(sample)])

    @contextmanager
    def engine_phase(self) -> Iterator[None]:
        """The engine has the device; it sleeps afterwards, where it may."""
        with self.strategy.actor_off_device(self.actor):
            yield
            self.phase.observe("generated")
            if self.config.rollout.enable_engine_sleep:
                self.strategy.sleep_engine()

    def generate_for_training(self, prompts: Sequence[NumberedPrompt], step: int) -> list[list[Experience]]:
        """The samples of each prompt; where they are the baseline, its greedy response comes last."""
        num_samples = self.config.rollout.n_samples_per_prompt
        groups = self.generate(prompts, step, num_samples, self.params)
        if not self.config.algorithm.rolls_out_greedily:
            return groups
        params = replace(self.params, temperature=0.0, first_token_temperature=None)
        greedy = self.generate(prompts, step, 1, params, first_index=num_samples)
        return [group + best for group, best in zip(groups, greedy, strict=True)]

    def is_greedy(self, sample: Experience) -> bool:
        """Whether the sample is a baseline alone: nothing is learned from its tokens."""
        return sample.index == self.config.rollout.n_samples_per_prompt

    def generate(
        self,
        prompts: Sequence[NumberedPrompt],
        step: int,
        num_samples: int,
        params: SamplingParams,
        first_index: int = 0,
    ) -> list[list[Experience]]:
        """The samples of each prompt, numbered from `first_index` on, by an engine that is awake."""
        seed = self.config.train.seed
        seeds = [[sampling_key(seed, step, p.row, j) for j in range(num_samples)] for _, p in prompts]
        outputs = self.strategy.gather_and_generate([p for _, p in prompts], params, seeds)
        groups = [
            [
                make_sample(self.tokenizer, self.model.hf_config, group, j, prompt, output)
                for j, output in enumerate(prompt_outputs, start=first_index)
            ]
            for (group, prompt), prompt_outputs in zip(prompts, outputs, strict=True)
        ]
        if params.first_token_temperature is None:
            return groups
        return [[without_first_token(sample) for sample in group] for group in groups]

    def submitted(self, groups: list[list[Experience]]) -> list[Experience]:
        """The samples, ordered and dealt by their tokens; the reward engine has begun to score them."""
        samples = [sample for group in self.strategy.dealer.balance_groups(groups) for sample in group]
        self.reward_engine.submit(samples)
        return samples

    def rewarded(self, samples: Sequence[Experience]) -> list[Experience]:
        """The submitted samples with their rewards. Every rank must call it."""
        return [scored(sample, output) for sample, output in zip(samples, self.reward_engine.result(), strict=True)]

    def rewarded_groups(self, groups: list[list[Experience]]) -> list[list[Experience]]:
        """The groups with their rewards, where they were drawn. Every rank must call it."""
        self.reward_engine.submit([sample for group in groups for sample in group])
        samples = iter(self.rewarded([sample for group in groups for sample in group]))
        return [[next(samples) for _ in group] for group in groups]


def make_sample(
    tokenizer: PreTrainedTokenizerBase,
    hf_config: PretrainedConfig,
    group: int,
    index: int,
    prompt: PromptExample,
    output: GenerationOutput,
) -> Experience:
    """The very ids that the engine used, with a mask made from lengths, and with the prompt's model inputs."""
    input_ids = torch.tensor(prompt.prompt_ids + output.response_ids)
    num_new = len(output.response_ids)
    token_inputs = {
        name: torch.cat([values, values.new_zeros(num_new, *values.shape[1:])])
        for name, values in prompt.token_inputs.items()
    }
    log_probs = output.log_probs
    response = tokenizer.decode(output.response_ids, skip_special_tokens=True)
    assert isinstance(response, str)
    return Experience(
        group=group,
        index=index,
        # Decoded media would travel with every sample to the rewards and between ranks.
        example=replace(prompt, token_inputs={}, item_inputs={}),
        response=response,
        input_ids=input_ids,
        position_ids=position_ids(hf_config, input_ids, prompt.item_inputs),
        response_start=len(prompt.prompt_ids),
        action_mask=torch.ones(num_new, dtype=torch.bool),
        finish_reason=output.finish_reason,
        rollout_log_probs=None if log_probs is None else torch.tensor(log_probs, dtype=torch.float32),
        token_inputs=token_inputs,
        item_inputs=prompt.item_inputs,
    )


def without_first_token(sample: Experience) -> Experience:
    """The sample without its first token in the loss: another distribution than the policy's has drawn it.

    The others were drawn by the policy after it, so their ratios and advantages stand.
    """
    return replace(sample, action_mask=torch.cat([torch.tensor([False]), sample.action_mask[1:]]))


def scored(sample: Experience, output: RewardOutput) -> Experience:
    """The sample with its reward; an excluded one leaves the loss by its mask."""
    sample = replace(sample, reward=output.score, reward_components=output.components, reward_faults=output.faults)
    return sample if output.score is not None else without_loss(sample)
