"""FastExperienceMaker: from prompts to experiences, one model role after the other."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.config import Config
from lightrft.models.collate import Layout, micro_batches
from lightrft.rewards.records import RewardOutput
from lightrft.strategy.strategy_base import Plan, StrategyBase
from lightrft.trainer.advantages import AdvantageComputation, without_loss
from lightrft.trainer.dynamic_sampling import chosen_groups, has_variance
from lightrft.trainer.functions import Estimator
from lightrft.trainer.mismatch import MismatchCheck
from lightrft.trainer.phases import PhaseClock
from lightrft.trainer.reward_engine import RewardComputationEngine
from lightrft.types import Experience, GenerationOutput, MicroBatch, PromptExample, SamplingParams
from lightrft.utils.means import Means
from lightrft.utils.sampling_key import sampling_key

LOG_PROB_MISMATCH = "rollout/log_prob_mismatch"
"""Mean absolute difference between the engine's log-probs and the actor's, of the policy that sampled."""

NumberedPrompt: TypeAlias = tuple[int, PromptExample]
"""Index in the global rollout batch, and the prompt there."""
FurtherPrompts: TypeAlias = Callable[[int], Sequence[NumberedPrompt] | None]
"""This rank's prompts of a step's next batch, by the number of batches before it; None on all ranks for no more."""


@dataclass(frozen=True)
class Roles:
    """The models of a run; None = not in the run."""

    actor: nn.Module
    initial_model: nn.Module | None
    critic: nn.Module | None
    teacher: nn.Module | None = None


@dataclass(frozen=True)
class Rollout:
    """One step's experiences on this rank, and the plan of forwards by which they were scored."""

    experiences: list[Experience]
    plan: Plan


class FastExperienceMaker:
    """Steps 1 to 8 of an iteration. Every rank must call `make_experience_list`, and `rollout` for evaluation."""

    def __init__(
        self,
        config: Config,
        strategy: StrategyBase,
        roles: Roles,
        reward_engine: RewardComputationEngine,
        estimator: Estimator,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        layout: Layout,
        phase: PhaseClock,
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.roles = roles
        self.reward_engine = reward_engine
        self.advantages = AdvantageComputation(config, strategy.collectives, estimator)
        self.tokenizer = tokenizer
        self.layout: Layout = layout
        self.phase = phase
        rollout = config.rollout
        self.mismatch = MismatchCheck(strategy.collectives, rollout.engine_type)
        self.params = SamplingParams(
            max_new_tokens=rollout.generate_max_len,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=stop_token_ids,
            stop=rollout.stop,
            first_token_temperature=rollout.first_token_temperature if rollout.use_fire else None,
        )

    def make_experience_list(
        self,
        prompts: Sequence[NumberedPrompt],
        step: int,
        kl_coef: float,
        means: Means,
        further_prompts: FurtherPrompts = lambda num_batches: None,
    ) -> Rollout:
        """This rank's experiences of a step, with advantages; what was seen on the way goes into `means`."""
        self.phase("generate")
        is_dynamic = self.config.rollout.dynamic_sampling
        everything = (
            self.dynamic_rollout(prompts, step, further_prompts, means)
            if is_dynamic
            else self.submitted(self.training_groups(prompts, step))
        )
        samples = [sample for sample in everything if not self.is_greedy(sample)]
        plan = self.strategy.agree_plan(samples, self.layout == "padded")
        self.phase("actor")
        log_probs, entropies = self._old_log_probs(samples, plan)
        self.phase("reference")
        base_log_probs = self._frozen_log_probs("reference", self.roles.initial_model, samples, plan)
        teacher_log_probs = self._frozen_log_probs("teacher", self.roles.teacher, samples, plan)
        self.phase("critic")
        values, bootstrap_values = self._values(samples, plan)
        self.phase("reward")
        if not is_dynamic:
            everything = self.rewarded(everything)
        self.phase("advantages")
        samples, greedy = self.with_baselines(everything)
        samples = [
            replace(
                sample,
                action_log_probs=log_probs[i],
                base_action_log_probs=base_log_probs[i] if base_log_probs else None,
                values=values[i] if values else None,
                bootstrap_value=float(bootstrap_values[i]) if bootstrap_values else None,
            )
            for i, sample in enumerate(samples)
        ]
        add_rollout_means(means, samples)
        made = self.advantages.compute(samples, kl_coef, means, greedy, entropies, teacher_log_probs)
        return Rollout(made, plan)

    # Rollouts

    def rollout(
        self, prompts: Sequence[NumberedPrompt], step: int, num_samples: int, params: SamplingParams
    ) -> list[Experience]:
        """Samples responses and submits them to the reward engine; the samples are ordered, dealt by their tokens."""
        with self.engine_phase():
            groups = self.generate(prompts, step, num_samples, params)
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
        with self.strategy.actor_off_device(self.roles.actor):
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
                make_sample(self.tokenizer, group, j, prompt, output)
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

    def with_baselines(self, samples: Sequence[Experience]) -> tuple[list[Experience], list[Experience]]:
        """Samples to train on and greedy ones; without its prompt's greedy reward, a sample is excluded too."""
        greedy = [sample for sample in samples if self.is_greedy(sample)]
        without = {sample.group for sample in greedy if sample.reward is None}
        drawn = [sample for sample in samples if not self.is_greedy(sample)]
        return [without_loss(replace(s, reward=None)) if s.group in without else s for s in drawn], greedy

    # Roles

    def run_role(
        self,
        name: str,
        model: nn.Module,
        samples: Sequence[Experience],
        plan: Plan,
        score: Callable[[nn.Module, MicroBatch], list[Tensor]],
    ) -> list[Tensor]:
        """One tensor per sample from a forward of each micro-batch of the plan, on the CPU and without a graph."""
        results: dict[int, Tensor] = {}
        for micro, indices, _ in micro_batches(samples, plan, self.layout, self.strategy.device):
            with torch.no_grad(), self.strategy.waiting(f"{name} forward"):
                scores = score(model, micro)
            results |= dict(zip(indices, [s.cpu() for s in scores[: len(indices)]], strict=True))
        self.phase.observe("scored")
        return [results[i] for i in range(len(samples))]

    def _log_probs(self, model: nn.Module, micro: MicroBatch) -> list[Tensor]:
        return list(model(micro, self.params.temperature).log_probs.split(micro.lengths))

    def _log_probs_and_entropies(self, model: nn.Module, micro: MicroBatch) -> list[Tensor]:
        output = model(micro, self.params.temperature)
        return list(torch.stack([output.log_probs, output.entropy]).split(micro.lengths, dim=1))

    def _old_log_probs(
        self, samples: Sequence[Experience], plan: Plan
    ) -> tuple[Sequence[Tensor | None], list[Tensor] | None]:
        """Log-probs of the policy that sampled, and its entropies where tokens are selected by them."""
        algorithm = self.config.algorithm
        if algorithm.old_log_probs == "engine":
            return [sample.rollout_log_probs for sample in samples], None
        entropies = None
        if algorithm.high_entropy_token_ratio > 0:
            both = self.run_role("actor", self.roles.actor, samples, plan, self._log_probs_and_entropies)
            log_probs, entropies = [b[0] for b in both], [b[1] for b in both]
        else:
            log_probs = self.run_role("actor", self.roles.actor, samples, plan, self._log_probs)
        self.mismatch.add(samples, log_probs, self.strategy.weight_version)
        return log_probs, entropies

    def _frozen_log_probs(
        self, name: str, model: nn.Module | None, samples: Sequence[Experience], plan: Plan
    ) -> list[Tensor] | None:
        if model is None:
            return None
        with self.strategy.on_device(model):
            return self.run_role(name, model, samples, plan, self._log_probs)

    def _values(self, samples: Sequence[Experience], plan: Plan) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """Values of each response token and the value after the last one."""
        if self.roles.critic is None:
            return None, None

        def score(model: nn.Module, micro: MicroBatch) -> list[Tensor]:
            values, bootstrap_values = model(micro)
            split = values.split(micro.lengths)
            return [torch.cat([v, b[None]]) for v, b in zip(split, bootstrap_values, strict=True)]

        with self.strategy.critic_on_device(self.roles.critic):
            both = self.run_role("critic", self.roles.critic, samples, plan, score)
        return [b[:-1] for b in both], [b[-1] for b in both]


def make_sample(
    tokenizer: PreTrainedTokenizerBase, group: int, index: int, prompt: PromptExample, output: GenerationOutput
) -> Experience:
    """The very ids that the engine used, with a mask made from lengths."""
    input_ids = torch.tensor(prompt.prompt_ids + output.response_ids)
    log_probs = output.log_probs
    response = tokenizer.decode(output.response_ids, skip_special_tokens=True)
    assert isinstance(response, str)
    return Experience(
        group=group,
        index=index,
        example=prompt,
        response=response,
        input_ids=input_ids,
        position_ids=torch.arange(len(input_ids)),
        response_start=len(prompt.prompt_ids),
        action_mask=torch.ones(len(output.response_ids), dtype=torch.bool),
        finish_reason=output.finish_reason,
        rollout_log_probs=None if log_probs is None else torch.tensor(log_probs, dtype=torch.float32),
    )


def without_first_token(sample: Experience) -> Experience:
    """The sample without its first token in the loss: another distribution than the policy's has drawn it.

    The others were drawn by the policy after it, so their ratios and advantages stand.
    """
    return replace(sample, action_mask=torch.cat([torch.tensor([False]), sample.action_mask[1:]]))


def scored(sample: Experience, output: RewardOutput) -> Experience:
    """The sample with its reward; an excluded one leaves the loss by its mask."""
    sample = replace(sample, reward=output.score, reward_components=output.components)
    return sample if output.score is not None else without_loss(sample)


def add_reward_means(means: Means, samples: Sequence[Experience], prefix: str) -> None:
    """Mean reward, mean of its square (for the deviation) and mean of each component, over samples with a reward."""
    for sample in samples:
        if sample.reward is None:
            continue
        means.add(f"{prefix}/mean", sample.reward, 1)
        means.add(f"{prefix}/mean_square", sample.reward**2, 1)
        for name, value in sample.reward_components.items():
            means.add(f"{prefix}/{name}", value, 1)


def add_rollout_means(means: Means, samples: Sequence[Experience]) -> None:
    add_reward_means(means, samples, "reward")
    for sample in samples:
        means.add("reward/excluded", sample.reward is None, 1)
        means.add("rollout/response_length", sample.num_response_tokens, 1)
        means.add("rollout/truncated", sample.finish_reason == "length", 1)
        engine, actor = sample.rollout_log_probs, sample.action_log_probs
        # With --old_log_probs engine they are one and the same, and the update measures the actor's.
        if engine is not None and actor is not None and engine is not actor:
            means.add_masked(LOG_PROB_MISMATCH, (engine - actor).abs(), sample.action_mask)
