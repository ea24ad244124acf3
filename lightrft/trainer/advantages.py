"""AdvantageComputation: step 8 of an iteration, from rewarded and scored samples to what the losses read."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightrft.config import Config
from lightrft.config.arguments import WHITENED_ESTIMATORS
from lightrft.ops.advantages import AdvantageInputs
from lightrft.ops.corrections import CORRECTIONS, CorrectionInputs
from lightrft.ops.entropy import high_entropy_threshold
from lightrft.ops.groups import count_groups
from lightrft.ops.kl import KL_ESTIMATORS
from lightrft.ops.segments import masked_moments, masked_sum, whiten, zero_masked
from lightrft.strategy.utils.collectives import Collectives
from lightrft.trainer.functions import Estimator
from lightrft.trainer.shaping import RewardShaping
from lightrft.types import Experience
from lightrft.utils.means import Means


class AdvantageComputation:
    """Shapes rewards, estimates advantages, and weighs them.

    The order is whitening, clip, a teacher's part, correction and selection.

    Args:
        config: All flags.
        collectives: Moments, and the threshold of entropies, are of all ranks.
        estimator: That of `--advantage_estimator`.
    """

    def __init__(self, config: Config, collectives: Collectives, estimator: Estimator) -> None:
        self.config = config
        self.collectives = collectives
        self.estimator = estimator
        self.shaping = RewardShaping(config, collectives)

    def compute(
        self,
        samples: Sequence[Experience],
        kl_coef: float,
        means: Means,
        greedy: Sequence[Experience] = (),
        entropies: Sequence[Tensor] | None = None,
        teacher_log_probs: Sequence[Tensor] | None = None,
    ) -> list[Experience]:
        """The samples with advantages and returns. Every rank must call it.

        Args:
            samples: Of whole groups, with rewards and with what each role gives them.
            kl_coef: Weight of the KL divergence.
            means: Takes what was seen on the way.
            greedy: The greedy response of each group, where the estimator asks for them.
            entropies: `(L,)` of each sample, where tokens are selected by them.
            teacher_log_probs: `(L,)` of each sample, where there is a teacher.
        """
        if self.config.algorithm.overlong_filter:
            samples = [without_loss(s) if s.finish_reason == "length" else s for s in samples]
        inputs = self._inputs(samples, greedy, kl_coef, means)
        with self.collectives.collect("advantages"):
            advantages, returns = self.estimator(inputs)
        advantages = self._scaled(advantages, inputs, means)
        if teacher_log_probs is not None:
            advantages = self._taught(advantages, samples, _flat(teacher_log_probs), inputs, means)
        advantages = self._corrected(advantages, samples, inputs, means)
        if entropies is not None:
            advantages = self._selected(advantages, _flat(entropies), inputs, means)
        lengths = list(inputs.lengths)
        split = zip(samples, advantages.split(lengths), returns.split(lengths), strict=True)
        return [replace(sample, advantages=a, returns=r) for sample, a, r in split]

    def _inputs(
        self, samples: Sequence[Experience], greedy: Sequence[Experience], kl_coef: float, means: Means
    ) -> AdvantageInputs:
        algorithm = self.config.algorithm
        action_mask = torch.cat([s.action_mask for s in samples] + [torch.zeros(0, dtype=torch.bool)])
        scores = self.shaping.scores([*samples, *greedy], means)
        groups = torch.tensor([s.group for s in samples], dtype=torch.long)
        kl = self._kl(samples, action_mask, means)
        inputs = AdvantageInputs(
            scores=scores[: len(samples)],
            groups=groups,
            valid=torch.tensor([s.reward is not None for s in samples], dtype=torch.bool),
            action_mask=action_mask,
            lengths=[s.num_response_tokens for s in samples],
            kl=None if algorithm.use_kl_loss else kl,
            kl_coef=kl_coef,
            values=_flat([s.values for s in samples]) if algorithm.trains_critic else None,
            bootstrap_values=self._bootstrap_values(samples) if algorithm.trains_critic else None,
            gamma=algorithm.gamma,
            lambd=algorithm.lambd,
            greedy_scores=_by_group(groups, greedy, scores[len(samples) :]) if algorithm.rolls_out_greedily else None,
        )
        counts = count_groups(inputs.scores, inputs.groups, inputs.valid)
        means.add("rollout/zero_variance_groups", counts.zero_variance, counts.total)
        means.add("rollout/too_small_groups", counts.too_small, counts.total)
        return inputs

    def _kl(self, samples: Sequence[Experience], action_mask: Tensor, means: Means) -> Tensor | None:
        """Per-token KL divergence from the reference model; None where there is none."""
        algorithm = self.config.algorithm
        if algorithm.init_kl_coef == 0:
            return None
        log_probs = _flat([s.action_log_probs for s in samples])
        kl = KL_ESTIMATORS[algorithm.kl_estimator](log_probs, _flat([s.base_action_log_probs for s in samples]))
        means.add("kl/reference", masked_sum(kl, action_mask), int(action_mask.sum()))
        return kl

    def _bootstrap_values(self, samples: Sequence[Experience]) -> Tensor:
        """The critic's value after a truncated response where asked for; 0 after a stop, where nothing follows."""
        use = self.config.algorithm.truncation_bootstrap
        return torch.tensor(
            [s.bootstrap_value if use and s.finish_reason == "length" else 0.0 for s in samples], dtype=torch.float32
        )

    def _scaled(self, advantages: Tensor, inputs: AdvantageInputs, means: Means) -> Tensor:
        """Whitened over all ranks and clipped, where asked for."""
        algorithm, mask = self.config.algorithm, inputs.action_mask
        if algorithm.advantages_norm or algorithm.advantage_estimator in WHITENED_ESTIMATORS:
            moments = self.collectives.all_reduce_sum(masked_moments(advantages, mask).tolist())
            advantages = whiten(advantages, mask, torch.tensor(moments, dtype=torch.float64))
        if algorithm.advantage_clip > 0:
            means.add_masked("advantages/clipped", advantages.abs() > algorithm.advantage_clip, mask)
            advantages = advantages.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
        return advantages

    def _taught(
        self,
        advantages: Tensor,
        samples: Sequence[Experience],
        teacher_log_probs: Tensor,
        inputs: AdvantageInputs,
        means: Means,
    ) -> Tensor:
        """Less the reverse KL divergence from the teacher, at each token its own."""
        kl = _flat([s.action_log_probs for s in samples]) - teacher_log_probs
        means.add_masked("kl/teacher", kl, inputs.action_mask)
        return advantages - self.config.algorithm.opd_kl_coef * zero_masked(kl, inputs.action_mask)

    def _corrected(
        self, advantages: Tensor, samples: Sequence[Experience], inputs: AdvantageInputs, means: Means
    ) -> Tensor:
        """Weighed by what the actor and the engine make of each token."""
        algorithm = self.config.algorithm
        if algorithm.rollout_correction == "none":
            return advantages
        weights = CORRECTIONS[algorithm.rollout_correction](
            CorrectionInputs(
                old_log_probs=_flat([s.action_log_probs for s in samples]),
                rollout_log_probs=_flat([s.rollout_log_probs for s in samples]),
                action_mask=inputs.action_mask,
                lengths=inputs.lengths,
                low=algorithm.correction_low,
                high=algorithm.correction_high,
            )
        )
        means.add_masked("correction/weight", weights, inputs.action_mask)
        means.add_masked("correction/masked", weights == 0, inputs.action_mask)
        return advantages * weights

    def _selected(self, advantages: Tensor, entropies: Tensor, inputs: AdvantageInputs, means: Means) -> Tensor:
        """0 at all but the tokens of the highest entropy; the loss's divisor still counts them all."""
        mask = inputs.action_mask
        everywhere = torch.cat(self.collectives.all_gather_objects(entropies[mask]))
        threshold = high_entropy_threshold(everywhere, self.config.algorithm.high_entropy_token_ratio)
        is_selected = entropies >= threshold
        means.add_masked("advantages/selected", is_selected, mask)
        return torch.where(is_selected, advantages, 0.0)


def without_loss(sample: Experience) -> Experience:
    """The sample with no token in the loss; it keeps its reward."""
    return replace(sample, action_mask=torch.zeros_like(sample.action_mask))


def _by_group(groups: Tensor, greedy: Sequence[Experience], scores: Tensor) -> Tensor:
    """Score of the greedy response to each sample's prompt."""
    by_group = {sample.group: score for sample, score in zip(greedy, scores.tolist(), strict=True)}
    return torch.tensor([by_group[group] for group in groups.tolist()], dtype=scores.dtype)


def _flat(tensors: Sequence[Tensor | None]) -> Tensor:
    present = [tensor for tensor in tensors if tensor is not None]
    assert len(present) == len(tensors)
    return torch.cat([*present, torch.zeros(0)])
