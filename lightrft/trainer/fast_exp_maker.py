"""FastExperienceMaker: from prompts to experiences, one model role after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.config import Config
from lightrft.models.collate import Layout, micro_batches
from lightrft.ops.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, count_groups
from lightrft.ops.kl import KL_ESTIMATORS
from lightrft.ops.segments import masked_moments, masked_sum, whiten
from lightrft.rewards.records import RewardOutput
from lightrft.strategy.strategy_base import Plan, StrategyBase
from lightrft.trainer.reward_engine import RewardComputationEngine
from lightrft.types import Experience, GenerationOutput, MicroBatch, PromptExample, SamplingParams
from lightrft.utils.means import Means
from lightrft.utils.sampling_key import sampling_key

NumberedPrompt: TypeAlias = tuple[int, PromptExample]
"""Index in the global rollout batch, and the prompt there."""


@dataclass(frozen=True)
class Roles:
    """The models of a run; None = not in the run."""

    actor: nn.Module
    initial_model: nn.Module | None
    critic: nn.Module | None


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
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
        layout: Layout,
        phase: Callable[[str], object],
    ) -> None:
        self.config = config
        self.strategy = strategy
        self.roles = roles
        self.reward_engine = reward_engine
        self.tokenizer = tokenizer
        self.layout: Layout = layout
        self.phase = phase
        rollout = config.rollout
        self.params = SamplingParams(
            max_new_tokens=rollout.generate_max_len,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=stop_token_ids,
            stop=rollout.stop,
        )

    def make_experience_list(
        self, prompts: Sequence[NumberedPrompt], step: int, kl_coef: float, means: Means
    ) -> Rollout:
        """This rank's experiences of a step, with advantages; what was seen on the way goes into `means`."""
        self.phase("generate")
        samples = self.rollout(prompts, step, self.config.rollout.n_samples_per_prompt)
        plan = self.strategy.agree_plan(samples, self.layout == "padded")
        self.phase("actor")
        log_probs = self.run_role("actor", self.roles.actor, samples, plan, self._log_probs)
        self.phase("reference")
        base_log_probs = self._base_log_probs(samples, plan)
        self.phase("critic")
        values, bootstrap_values = self._values(samples, plan)
        self.phase("reward")
        rewards = self.reward_engine.result()
        self.phase("advantages")
        samples = [
            replace(
                scored(sample, rewards[i]),
                action_log_probs=log_probs[i],
                base_action_log_probs=base_log_probs[i] if base_log_probs else None,
                values=values[i] if values else None,
                bootstrap_value=float(bootstrap_values[i]) if bootstrap_values else None,
            )
            for i, sample in enumerate(samples)
        ]
        add_rollout_means(means, samples)
        return Rollout(self.with_advantages(samples, kl_coef, means), plan)

    def rollout(
        self, prompts: Sequence[NumberedPrompt], step: int, num_samples: int, params: SamplingParams | None = None
    ) -> list[Experience]:
        """Samples responses and submits them to the reward engine; the samples are ordered, dealt by their tokens.

        `params` None takes those of training.
        """
        seed = self.config.train.seed
        seeds = [[sampling_key(seed, step, p.row, j) for j in range(num_samples)] for _, p in prompts]
        outputs = self.strategy.gather_and_generate([p for _, p in prompts], params or self.params, seeds)
        if self.config.rollout.enable_engine_sleep:
            self.strategy.sleep_engine()
        groups = [
            [self.make_sample(group, j, prompt, output) for j, output in enumerate(prompt_outputs)]
            for (group, prompt), prompt_outputs in zip(prompts, outputs, strict=True)
        ]
        samples = [sample for group in self.strategy.dealer.balance_groups(groups) for sample in group]
        self.reward_engine.submit(samples)
        return samples

    def make_sample(self, group: int, index: int, prompt: PromptExample, output: GenerationOutput) -> Experience:
        """The very ids that the engine used, with a mask made from lengths."""
        input_ids = torch.tensor(prompt.prompt_ids + output.response_ids)
        log_probs = output.log_probs
        response = self.tokenizer.decode(output.response_ids, skip_special_tokens=True)
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
        return [results[i] for i in range(len(samples))]

    def _log_probs(self, model: nn.Module, micro: MicroBatch) -> list[Tensor]:
        return list(model(micro, self.params.temperature).log_probs.split(micro.lengths))

    def _base_log_probs(self, samples: Sequence[Experience], plan: Plan) -> list[Tensor] | None:
        if self.roles.initial_model is None:
            return None
        with self.strategy.on_device(self.roles.initial_model):
            return self.run_role("reference", self.roles.initial_model, samples, plan, self._log_probs)

    def _values(self, samples: Sequence[Experience], plan: Plan) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        """Values of each response token and the value after the last one."""
        if self.roles.critic is None:
            return None, None

        def score(model: nn.Module, micro: MicroBatch) -> list[Tensor]:
            values, bootstrap_values = model(micro)
            split = values.split(micro.lengths)
            return [torch.cat([v, b[None]]) for v, b in zip(split, bootstrap_values, strict=True)]

        both = self.run_role("critic", self.roles.critic, samples, plan, score)
        return [b[:-1] for b in both], [b[-1] for b in both]

    # Advantages

    def with_advantages(self, samples: list[Experience], kl_coef: float, means: Means) -> list[Experience]:
        """Every rank must call it: whitening takes the moments of all ranks."""
        algorithm = self.config.algorithm
        inputs = self._advantage_inputs(samples, kl_coef, means)
        advantages, returns = ADVANTAGE_ESTIMATORS[algorithm.advantage_estimator](inputs)
        if algorithm.advantages_norm:
            moments = self.strategy.collectives.all_reduce_sum(masked_moments(advantages, inputs.action_mask).tolist())
            advantages = whiten(advantages, inputs.action_mask, torch.tensor(moments, dtype=torch.float64))
        lengths = list(inputs.lengths)
        split = zip(samples, advantages.split(lengths), returns.split(lengths), strict=True)
        return [replace(sample, advantages=a, returns=r) for sample, a, r in split]

    def _advantage_inputs(self, samples: list[Experience], kl_coef: float, means: Means) -> AdvantageInputs:
        algorithm = self.config.algorithm
        action_mask = torch.cat([s.action_mask for s in samples] + [torch.zeros(0, dtype=torch.bool)])
        kl = None
        if self.roles.initial_model is not None:
            log_probs = _flat([s.action_log_probs for s in samples])
            kl = KL_ESTIMATORS[algorithm.kl_estimator](log_probs, _flat([s.base_action_log_probs for s in samples]))
            means.add("kl/reference", masked_sum(kl, action_mask), int(action_mask.sum()))
        inputs = AdvantageInputs(
            scores=torch.tensor([0.0 if s.reward is None else s.reward for s in samples], dtype=torch.float32),
            groups=torch.tensor([s.group for s in samples], dtype=torch.long),
            valid=torch.tensor([s.reward is not None for s in samples], dtype=torch.bool),
            action_mask=action_mask,
            lengths=[s.num_response_tokens for s in samples],
            kl=None if algorithm.use_kl_loss else kl,
            kl_coef=kl_coef,
            values=None if self.roles.critic is None else _flat([s.values for s in samples]),
            bootstrap_values=None if self.roles.critic is None else self._bootstrap_values(samples),
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
        )
        counts = count_groups(inputs.scores, inputs.groups, inputs.valid)
        means.add("rollout/zero_variance_groups", counts.zero_variance, counts.total)
        means.add("rollout/too_small_groups", counts.too_small, counts.total)
        return inputs

    def _bootstrap_values(self, samples: Sequence[Experience]) -> Tensor:
        """The critic's value after a truncated response where asked for; 0 after a stop, where nothing follows."""
        use = self.config.algorithm.truncation_bootstrap
        return torch.tensor(
            [s.bootstrap_value if use and s.finish_reason == "length" else 0.0 for s in samples], dtype=torch.float32
        )


def scored(sample: Experience, output: RewardOutput) -> Experience:
    """The sample with its reward; an excluded one leaves the loss by its mask."""
    mask = sample.action_mask if output.score is not None else torch.zeros_like(sample.action_mask)
    return replace(sample, reward=output.score, reward_components=output.components, action_mask=mask)


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
        if sample.rollout_log_probs is not None and sample.action_log_probs is not None:
            difference = (sample.rollout_log_probs - sample.action_log_probs).abs()
            means.add_masked("rollout/log_prob_mismatch", difference, sample.action_mask)


def _flat(tensors: Sequence[Tensor | None]) -> Tensor:
    present = [tensor for tensor in tensors if tensor is not None]
    assert len(present) == len(tensors)
    return torch.cat([*present, torch.zeros(0)])
