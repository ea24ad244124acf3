"""Advantages: estimators of how much better each token is than what was to be expected."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lightrft.ops.groups import best_margin, group_center, group_norm, leave_one_out
from lightrft.ops.returns import discounted_returns, gae, token_rewards
from lightrft.ops.segments import zero_masked


@dataclass(frozen=True)
class AdvantageInputs:
    """What any estimator may read."""

    scores: Float[Tensor, "samples"]
    groups: Int[Tensor, "samples"]
    """Equal for samples of the same prompt."""
    valid: Bool[Tensor, "samples"]
    """False = excluded: the score is not read. Its tokens are False in `action_mask`."""
    action_mask: Bool[Tensor, "tokens"]
    lengths: Sequence[int]
    kl: Float[Tensor, "tokens"] | None
    """None when no KL is taken off the reward."""
    kl_coef: float
    values: Float[Tensor, "tokens"] | None
    """None without a critic."""
    bootstrap_values: Float[Tensor, "samples"] | None
    """Value after the last token: 0 after a stop. None without a critic."""
    gamma: float
    lambd: float
    greedy_scores: Float[Tensor, "samples"] | None = None
    """Score of the greedy response to each sample's prompt. None where no estimator asks for it."""


Advantages = tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]
"""Advantages, and returns: the critic's targets. 0 at masked tokens."""


def gae_advantages(inputs: AdvantageInputs) -> Advantages:
    """`gae` of the raw scores and the KL: advantages and the critic's targets.

    Formula: A_t = sum over k of (gamma lambd)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k})

    Source: Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016).
    """
    assert inputs.values is not None and inputs.bootstrap_values is not None, "gae needs a critic's values"
    scores = zero_masked(inputs.scores, inputs.valid)
    rewards = token_rewards(scores, inputs.kl, inputs.kl_coef, inputs.action_mask, inputs.lengths)
    return gae(
        rewards,
        inputs.values,
        inputs.action_mask,
        inputs.lengths,
        inputs.bootstrap_values,
        inputs.gamma,
        inputs.lambd,
    )


def group_norm_advantages(inputs: AdvantageInputs) -> Advantages:
    """Discounted returns of the `group_norm` scores and the KL; advantages and returns are the same.

    Formula: A = (score - mean of its prompt's samples) / (their sample standard deviation + 1e-6)

    Source: Shao et al., "DeepSeekMath" (2024), section 4.1.2 (GRPO).
    """
    return _returns_of(group_norm(inputs.scores, inputs.groups, inputs.valid), inputs)


def dr_grpo_advantages(inputs: AdvantageInputs) -> Advantages:
    """GRPO without the division, which favours prompts whose samples score alike.

    The paper also sums tokens over a constant: `--loss_agg_mode seq-mean-token-sum-norm`.

    Formula: A = score - mean of its prompt's samples

    Source: Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective" (2025), section 3.2 (Dr. GRPO).
    """
    return _returns_of(group_center(inputs.scores, inputs.groups, inputs.valid), inputs)


def rloo_advantages(inputs: AdvantageInputs) -> Advantages:
    """The prompt's other samples are the baseline, which leaves the gradient unbiased.

    Formula: A = score - mean of its prompt's other samples

    Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (2024), RLOO.
    """
    return _returns_of(leave_one_out(inputs.scores, inputs.groups, inputs.valid), inputs)


def reinforce_advantages(inputs: AdvantageInputs) -> Advantages:
    """Discounted returns of the raw scores and the KL, without a baseline.

    Formula: A_t = sum over k of gamma^k r_{t+k}

    Source: Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning"
    (1992), section 5.
    """
    return _returns_of(zero_masked(inputs.scores, inputs.valid), inputs)


def reinforce_baseline_advantages(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE with the mean of the prompt's samples as its baseline: the numbers of dr_grpo.

    Formula: A = score - mean of its prompt's samples

    Source: Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning"
    (1992), section 4; as in OpenRLHF, without its whitening.
    """
    return _returns_of(group_center(inputs.scores, inputs.groups, inputs.valid), inputs)


def reinforce_pp_advantages(inputs: AdvantageInputs) -> Advantages:
    """REINFORCE; the run whitens the advantages over the tokens of all ranks, and takes a single sample a prompt too.

    Formula: A_t = whiten(sum over k of gamma^k r_{t+k})

    Source: Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Normalization" (2025).
    """
    return reinforce_advantages(inputs)


def reinforce_pp_baseline_advantages(inputs: AdvantageInputs) -> Advantages:
    """The prompt's mean is taken off first; the run whitens the advantages over the tokens of all ranks.

    Formula: A = whiten(score - mean of its prompt's samples)

    Source: Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Normalization" (2025),
    with baseline.
    """
    return reinforce_baseline_advantages(inputs)


def remax_advantages(inputs: AdvantageInputs) -> Advantages:
    """The score of the prompt's greedy response is the baseline, which costs one more response a prompt.

    Formula: A = score - score of the greedy response

    Source: Li et al., "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large
    Language Models" (2023), algorithm 1.
    """
    assert inputs.greedy_scores is not None, "remax needs the scores of greedy responses"
    return _returns_of(zero_masked(inputs.scores - inputs.greedy_scores, inputs.valid), inputs)


def cpgd_advantages(inputs: AdvantageInputs) -> Advantages:
    """GRPO with the population deviation, for the loss of the same name (`--policy_loss cpgd`).

    Formula: A = (score - mean of its prompt's samples) / (their population standard deviation + 1e-6)

    Source: Liu et al., "CPGD: Toward Stable Rule-based Reinforcement Learning for Language Models" (2025), with the
    weight STD.
    """
    return _returns_of(group_norm(inputs.scores, inputs.groups, inputs.valid, divisor="count"), inputs)


def grpo_passk_advantages(inputs: AdvantageInputs) -> Advantages:
    """Only the single best sample of a prompt learns: from what it adds to the best score, as pass@k counts it.

    Formula: A = best score - second best for the best sample of a prompt, 0 for its others

    Source: Tang et al., "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning"
    (2025), the leave-one-out advantage of pass@k.
    """
    return _returns_of(best_margin(inputs.scores, inputs.groups, inputs.valid), inputs)


def on_policy_distillation_advantages(inputs: AdvantageInputs) -> Advantages:
    """Nothing but what the run adds for a teacher, each token for itself; rewards are only looked at.

    With another estimator and a teacher, this is added to its advantages.

    Formula: A_t = opd_kl_coef (log pi_teacher - log pi)

    Source: Lu et al. (Thinking Machines), "On-Policy Distillation" (2025); Agarwal et al., "On-Policy Distillation of
    Language Models: Learning from Self-Generated Mistakes" (2024).
    """
    nothing = inputs.scores.new_zeros(inputs.action_mask.shape)
    return nothing, nothing


ADVANTAGE_ESTIMATORS: dict[str, Callable[[AdvantageInputs], tuple[Tensor, Tensor]]] = {
    "gae": gae_advantages,
    "group_norm": group_norm_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "reinforce": reinforce_advantages,
    "reinforce_baseline": reinforce_baseline_advantages,
    "reinforce++": reinforce_pp_advantages,
    "reinforce++_baseline": reinforce_pp_baseline_advantages,
    "remax": remax_advantages,
    "cpgd": cpgd_advantages,
    "grpo_passk": grpo_passk_advantages,
    "on_policy_distillation": on_policy_distillation_advantages,
}
"""`inputs -> (advantages (N,), returns (N,))`, 0 at masked tokens, by the name that `--advantage_estimator` takes."""


def _returns_of(scores: Float[Tensor, "samples"], inputs: AdvantageInputs) -> Advantages:
    """Discounted returns of each sample's score and the KL, as advantages and as returns."""
    rewards = token_rewards(scores, inputs.kl, inputs.kl_coef, inputs.action_mask, inputs.lengths)
    returns = discounted_returns(rewards, inputs.action_mask, inputs.lengths, inputs.gamma)
    return returns, returns
