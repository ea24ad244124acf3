import math
from dataclasses import replace

import pytest
import torch

from lightrft.ops.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from tests.ops.ragged import advantage_inputs, take_samples


def two_samples(**changes: object) -> AdvantageInputs:
    """Scores 1 and 0 of one prompt, of 2 and 3 tokens of which one is masked; no KL, no discount."""
    inputs = AdvantageInputs(
        scores=torch.tensor([1.0, 0.0]),
        groups=torch.tensor([0, 0]),
        valid=torch.tensor([True, True]),
        action_mask=torch.tensor([True, True, True, False, True]),
        lengths=[2, 3],
        kl=None,
        kl_coef=0.0,
        values=None,
        bootstrap_values=None,
        gamma=1.0,
        lambd=1.0,
    )
    return replace(inputs, **changes)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("group_norm", 0.7071, -0.7071),  # 0.5 / sqrt(2 * 0.25 / 1)
        ("dr_grpo", 0.5, -0.5),
        ("rloo", 1.0, -1.0),  # 1 - 0 and 0 - 1
        ("reinforce", 1.0, 0.0),
        ("reinforce_baseline", 0.5, -0.5),
        ("reinforce++", 1.0, 0.0),  # The run whitens them.
        ("reinforce++_baseline", 0.5, -0.5),
        ("remax", 0.75, -0.25),  # The greedy response scored 0.25.
        ("cpgd", 1.0, -1.0),  # 0.5 / sqrt(2 * 0.25 / 2)
        ("grpo_passk", 1.0, 0.0),
    ],
)
def test_every_kept_token_has_its_samples_advantage(name, first, second):
    advantages, returns = ADVANTAGE_ESTIMATORS[name](two_samples(greedy_scores=torch.tensor([0.25, 0.25])))
    assert advantages.tolist() == pytest.approx([first, first, second, 0.0, second], abs=1e-4)
    assert torch.equal(advantages, returns)


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS.keys() - {"gae", "on_policy_distillation"}))
def test_kl_is_taken_off_after_the_scores_were_compared(name):
    """NUM-10: 0.1 * 2 for each kept token from this one on; the masked token has none."""
    changes = {"kl": torch.tensor([2.0, 2.0, 2.0, math.nan, 2.0]), "kl_coef": 0.1}
    greedy = torch.tensor([0.25, 0.25])
    without, _ = ADVANTAGE_ESTIMATORS[name](two_samples(greedy_scores=greedy))
    advantages, _ = ADVANTAGE_ESTIMATORS[name](two_samples(greedy_scores=greedy, **changes))
    assert (without - advantages).tolist() == pytest.approx([0.4, 0.2, 0.4, 0.0, 0.2])


@pytest.mark.parametrize("name", sorted(ADVANTAGE_ESTIMATORS.keys() - {"gae", "on_policy_distillation"}))
def test_the_discount_is_by_tokens_after_this_one(name):
    greedy = torch.tensor([0.25, 0.25])
    whole, _ = ADVANTAGE_ESTIMATORS[name](two_samples(greedy_scores=greedy))
    advantages, _ = ADVANTAGE_ESTIMATORS[name](two_samples(greedy_scores=greedy, gamma=0.5))
    expected = whole * torch.tensor([0.5, 1.0, 0.5, 1.0, 1.0])
    assert advantages.tolist() == pytest.approx(expected.tolist())


def test_gae_estimator_uses_the_raw_score():
    # one token each: advantage = score - 0.1 * kl + bootstrap - value = 3 - 0.05 + 0 - 1; return = advantage + value
    inputs = AdvantageInputs(
        scores=torch.tensor([3.0]),
        groups=torch.tensor([0]),
        valid=torch.tensor([True]),
        action_mask=torch.tensor([True]),
        lengths=[1],
        kl=torch.tensor([0.5]),
        kl_coef=0.1,
        values=torch.tensor([1.0]),
        bootstrap_values=torch.zeros(1),
        gamma=1.0,
        lambd=0.95,
    )
    advantages, returns = ADVANTAGE_ESTIMATORS["gae"](inputs)
    assert (advantages.item(), returns.item()) == pytest.approx((1.95, 2.95))


def slow_scores(name: str, inputs: AdvantageInputs) -> list[float]:
    """What each sample's tokens share, by loops over the samples of each prompt; 0 for excluded samples."""
    scores, result = inputs.scores.tolist(), [0.0] * len(inputs.lengths)
    for group in set(inputs.groups.tolist()):
        members = [i for i in range(len(result)) if inputs.groups[i] == group and inputs.valid[i]]
        for i in members:
            result[i] = slow_score(name, inputs, scores, i, members)
    return result


def slow_score(name: str, inputs: AdvantageInputs, scores: list[float], i: int, members: list[int]) -> float:
    own, others = scores[i], [scores[j] for j in members if j != i]
    if name in ("gae", "reinforce", "reinforce++"):
        return own
    if name == "remax":
        assert inputs.greedy_scores is not None
        return own - inputs.greedy_scores[i].item()
    if not others:
        return 0.0
    if name == "rloo":
        return own - sum(others) / len(others)
    if name == "grpo_passk":
        return max(0.0, own - max(others))
    mean = (own + sum(others)) / len(members)
    if name in ("dr_grpo", "reinforce_baseline", "reinforce++_baseline"):
        return own - mean
    squares = sum((scores[j] - mean) ** 2 for j in members)
    divisor = len(members) - 1 if name == "group_norm" else len(members)
    return (own - mean) / (math.sqrt(squares / divisor) + 1e-6)


def slow_estimator(name: str, inputs: AdvantageInputs) -> tuple[list[float], list[float]]:
    """Every estimator, token by token from the end of each sample."""
    assert inputs.kl is not None and inputs.values is not None and inputs.bootstrap_values is not None
    scores = slow_scores(name, inputs)
    advantages, returns = [0.0] * len(inputs.kl), [0.0] * len(inputs.kl)
    if name == "on_policy_distillation":
        return advantages, returns
    end = 0
    for sample, length in enumerate(inputs.lengths):
        start, end = end, end + length
        kept = [t for t in range(start, end) if inputs.action_mask[t]]
        running, next_value, reward = 0.0, inputs.bootstrap_values[sample].item(), scores[sample]
        for t in reversed(kept):
            reward -= inputs.kl_coef * inputs.kl[t].item()
            value = inputs.values[t].item()
            if name == "gae":
                running = reward + inputs.gamma * next_value - value + inputs.gamma * inputs.lambd * running
                returns[t] = running + value
            else:
                running = reward + inputs.gamma * running
                returns[t] = running
            advantages[t] = running
            next_value, reward = value, 0.0
    return advantages, returns


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
@pytest.mark.parametrize("seed", range(3))
def test_estimators_equal_a_slow_reference(name, seed):
    inputs = advantage_inputs(seed)
    advantages, returns = ADVANTAGE_ESTIMATORS[name](inputs)
    expected_advantages, expected_returns = slow_estimator(name, inputs)
    assert advantages.tolist() == pytest.approx(expected_advantages, abs=1e-6)
    assert returns.tolist() == pytest.approx(expected_returns, abs=1e-6)
    masked = ~inputs.action_mask
    assert advantages[masked].count_nonzero() == returns[masked].count_nonzero() == 0


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_fp32_stays_close_to_fp64(name):
    single = advantage_inputs(0, torch.float32)
    fields = ("scores", "kl", "values", "bootstrap_values", "greedy_scores")
    double = replace(single, **{key: getattr(single, key).double() for key in fields})
    for low, high in zip(ADVANTAGE_ESTIMATORS[name](single), ADVANTAGE_ESTIMATORS[name](double), strict=True):
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), high, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
@pytest.mark.parametrize("seed", range(2))
def test_permuting_samples_permutes_advantages(name, seed):
    inputs = advantage_inputs(seed)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).tolist()
    permuted = ADVANTAGE_ESTIMATORS[name](take_samples(inputs, order))
    for flat, other in zip(ADVANTAGE_ESTIMATORS[name](inputs), permuted, strict=True):
        parts = flat.split(list(inputs.lengths))
        torch.testing.assert_close(other, torch.cat([parts[i] for i in order]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_splitting_into_whole_groups_changes_nothing(name):
    inputs = advantage_inputs(1)
    groups = [range(start, start + 4) for start in range(0, 16, 4)]
    shards = [ADVANTAGE_ESTIMATORS[name](take_samples(inputs, group)) for group in groups]
    for flat, parts in zip(ADVANTAGE_ESTIMATORS[name](inputs), zip(*shards, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts), flat, rtol=0, atol=1e-12)
