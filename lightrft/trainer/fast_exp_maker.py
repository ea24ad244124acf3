"""FastExperienceMaker: from prompts to experiences, one model role after the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.config import Config
from lightrft.models.collate import Layout, micro_batches
from lightrft.models.loading import LoadedConfig
from lightrft.strategy.strategy_base import Plan, StrategyBase
from lightrft.trainer.advantages import AdvantageComputation, without_loss
from lightrft.trainer.functions import Estimator
from lightrft.trainer.media_feed import MediaFeed
from lightrft.trainer.mismatch import MismatchCheck
from lightrft.trainer.phases import PhaseClock
from lightrft.trainer.remote_teacher import RemoteTeacher
from lightrft.trainer.reward_engine import RewardComputationEngine
from lightrft.trainer.roles import Roles
from lightrft.trainer.rollouts import FurtherPrompts, NumberedPrompt, Rollouts
from lightrft.types import Experience, MicroBatch
from lightrft.utils.means import Means

LOG_PROB_MISMATCH = "rollout/log_prob_mismatch"
"""Mean absolute difference between the engine's log-probs and the actor's, of the policy that sampled."""


@dataclass(frozen=True)
class Rollout:
    """One step's experiences on this rank, and the plan of forwards by which they were scored."""

    experiences: list[Experience]
    plan: Plan


class FastExperienceMaker:
    """Steps 1 to 8 of an iteration. Every rank must call its methods."""

    def __init__(
        self,
        config: Config,
        strategy: StrategyBase,
        roles: Roles,
        reward_engine: RewardComputationEngine,
        estimator: Estimator,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        model: LoadedConfig,
        fillers: Sequence[Experience],
        media: MediaFeed,
        phase: PhaseClock,
        remote_teacher: RemoteTeacher | None = None,
    ) -> None:
        """`model` is the actor's; `fillers` are one of each kind of media in the run."""
        self.config = config
        self.strategy = strategy
        self.roles = roles
        self.remote_teacher = remote_teacher
        self.advantages = AdvantageComputation(config, strategy.collectives, estimator)
        self.layout: Layout = model.layout
        self.fillers = fillers
        self.phase = phase
        self.mismatch = MismatchCheck(strategy.collectives, config.rollout.engine_type)
        self.rollouts = Rollouts(
            config, strategy, roles.actor, reward_engine, tokenizer, stop_token_ids, model, media, phase
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
            self.rollouts.dynamic_rollout(prompts, step, further_prompts, means)
            if is_dynamic
            else self.rollouts.submitted(self.rollouts.training_groups(prompts, step))
        )
        samples = [sample for sample in everything if not self.rollouts.is_greedy(sample)]
        if self.remote_teacher is not None:
            self.remote_teacher.submit(samples)
        plan = self.strategy.agree_plan(samples, self.layout == "padded")
        self.phase("actor")
        log_probs, entropies = self._old_log_probs(samples, plan)
        self.phase("reference")
        base_log_probs = self._frozen_log_probs("reference", self.roles.initial_model, samples, plan)
        teacher_log_probs = self._teacher_log_probs(samples, plan)
        self.phase("critic")
        values, bootstrap_values = self._values(samples, plan)
        self.phase("reward")
        if not is_dynamic:
            everything = self.rollouts.rewarded(everything)
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

    def with_baselines(self, samples: Sequence[Experience]) -> tuple[list[Experience], list[Experience]]:
        """Samples to train on and greedy ones; without its prompt's greedy reward, a sample is excluded too."""
        greedy = [sample for sample in samples if self.rollouts.is_greedy(sample)]
        without = {sample.group for sample in greedy if sample.reward is None}
        drawn = [sample for sample in samples if not self.rollouts.is_greedy(sample)]
        return [without_loss(replace(s, reward=None)) if s.group in without else s for s in drawn], greedy

    # Roles

    def micro_batches(
        self, samples: Sequence[Experience], plan: Plan
    ) -> Iterator[tuple[MicroBatch, Sequence[int], bool]]:
        """Those of any role; each has something of every kind of media in the run."""
        return micro_batches(samples, plan, self.layout, self.strategy.device, self.fillers)

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
        for micro, indices, _ in self.micro_batches(samples, plan):
            with torch.no_grad(), self.strategy.waiting(f"{name} forward"):
                scores = score(model, micro)[: len(indices)]
            if scores:
                # One copy off the device for all of them.
                columns = torch.cat(scores, -1).cpu().split([s.shape[-1] for s in scores], -1)
                results |= dict(zip(indices, [column.clone() for column in columns], strict=True))
        self.phase.observe("scored")
        return [results[i] for i in range(len(samples))]

    def _log_probs(self, model: nn.Module, micro: MicroBatch) -> list[Tensor]:
        return list(model(micro, self.rollouts.params.temperature).log_probs.split(micro.lengths))

    def _log_probs_and_entropies(self, model: nn.Module, micro: MicroBatch) -> list[Tensor]:
        output = model(micro, self.rollouts.params.temperature)
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

    def _teacher_log_probs(self, samples: Sequence[Experience], plan: Plan) -> list[Tensor] | None:
        if self.remote_teacher is not None:
            return self.remote_teacher.result()
        return self._frozen_log_probs("teacher", self.roles.teacher, samples, plan)

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


def add_reward_means(means: Means, samples: Sequence[Experience], prefix: str) -> None:
    """Mean reward, mean of its square (for the deviation) and mean of each component, over samples with a reward."""
    for sample in samples:
        if sample.reward is None:
            continue
        means.add(f"{prefix}/mean", sample.reward, 1)
        means.add(f"{prefix}/mean_square", sample.reward**2, 1)
        for name, value in sample.reward_components.items():
            means.add(f"{prefix}/{name}", value, 1)


def add_fault_means(means: Means, sample: Experience, prefix: str) -> None:
    """Shares of samples that are left out, that are for an error, and that have an ungradable component."""
    kinds = {fault.kind for fault in sample.reward_faults.values()}
    means.add(f"{prefix}/excluded", sample.reward is None, 1)
    means.add(f"{prefix}/failed", "error" in kinds, 1)
    means.add(f"{prefix}/ungradable", "ungradable" in kinds, 1)


def add_rollout_means(means: Means, samples: Sequence[Experience]) -> None:
    add_reward_means(means, samples, "reward")
    for sample in samples:
        add_fault_means(means, sample, "reward")
        means.add("rollout/response_length", sample.num_response_tokens, 1)
        means.add("rollout/truncated", sample.finish_reason == "length", 1)
        engine, actor = sample.rollout_log_probs, sample.action_log_probs
        # With --old_log_probs engine they are one and the same, and the update measures the actor's.
        if engine is not None and actor is not None and engine is not actor:
            means.add_masked(LOG_PROB_MISMATCH, (engine - actor).abs(), sample.action_mask)
