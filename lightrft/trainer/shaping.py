"""RewardShaping: from the rewards of samples to the scores that advantages are made of."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrft.config import Config
from lightrft.ops.segments import masked_moments, mean_std
from lightrft.ops.shaping import normalise_rewards, soft_overlong_penalty
from lightrft.strategy.utils.collectives import Collectives
from lightrft.types import Experience
from lightrft.utils.means import Means


class RewardShaping:
    """Penalty of long responses, running normalisation and clip, in this order; each where asked for.

    Rewards in samples.jsonl and in the metrics `reward/*` stay as they were given. Evaluation shapes nothing.
    """

    def __init__(self, config: Config, collectives: Collectives) -> None:
        self.config = config
        self.collectives = collectives
        self.moments: Sequence[float] = (0.0, 0.0, 0.0)
        """(sum, sum of squares, count) of all penalised rewards of the run, of all ranks."""

    def scores(self, samples: Sequence[Experience], means: Means) -> Tensor:
        """One fp32 score a sample, 0 for an excluded one. Every rank must call it: the moments are of all ranks."""
        reward = self.config.reward
        valid = torch.tensor([sample.reward is not None for sample in samples], dtype=torch.bool)
        scores = torch.tensor([sample.reward or 0.0 for sample in samples], dtype=torch.float32)
        if reward.overlong_buffer:
            penalty = self._penalty(samples)
            means.add("shaping/overlong_penalty", penalty[valid].sum(), int(valid.sum()))
            scores = torch.where(valid, scores + penalty, 0.0)
        if reward.reward_running_norm:
            scores = self._normalised(scores, valid, means)
        if reward.reward_clip > 0:
            is_cut = valid & (scores.abs() > reward.reward_clip)
            means.add("shaping/clipped", int(is_cut.sum()), int(valid.sum()))
            scores = scores.clamp(-reward.reward_clip, reward.reward_clip)
        return scores

    def _penalty(self, samples: Sequence[Experience]) -> Tensor:
        reward = self.config.reward
        lengths = torch.tensor([sample.num_response_tokens for sample in samples], dtype=torch.long)
        longest, factor = self.config.rollout.generate_max_len, reward.overlong_buffer_penalty_factor
        return soft_overlong_penalty(lengths, longest, reward.overlong_buffer_len, factor)

    def _normalised(self, scores: Tensor, valid: Tensor, means: Means) -> Tensor:
        new = self.collectives.all_reduce_sum(masked_moments(scores, valid).tolist())
        self.moments = tuple(old + added for old, added in zip(self.moments, new, strict=True))
        moments = torch.tensor(self.moments, dtype=torch.float64)
        mean, std = mean_std(moments)
        means.add("shaping/running_mean", mean, 1)
        means.add("shaping/running_std", std, 1)
        return normalise_rewards(scores, valid, moments, self.config.reward.reward_running_norm_minus_mean)
