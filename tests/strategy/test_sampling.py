import math

import pytest
import torch

from lightrft.strategy.torch_utils.sampling import keyed_uniforms, sample_tokens, token_log_probs
from lightrft.utils.sampling_key import GOLDEN, mix64, sampling_key

HALF_THIRD_FIFTH = torch.tensor([[0.5, 0.3, 0.2]]).log()
LAST_BELOW_1 = 1 - 2.0**-53


def draw(probs: list[float], uniforms: list[float], **params: float) -> list[int]:
    logits = torch.tensor([probs]).log().expand(len(uniforms), -1)
    return sample_tokens(logits, torch.tensor(uniforms, dtype=torch.float64), **params).tolist()


# Keys


def test_mix64_gives_the_published_outputs_of_splitmix64() -> None:
    """The generator with seed 0 mixes GOLDEN, 2 GOLDEN, 3 GOLDEN."""
    outputs = [mix64(n * GOLDEN) for n in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_a_sampling_key_changes_with_each_argument_and_with_their_order() -> None:
    keys = {sampling_key(*[3 + delta * (i == j) for j in range(4)]) for i in range(4) for delta in (0, 1, -4, 2**40)}
    keys |= {sampling_key(1, 2, 3, 4), sampling_key(4, 3, 2, 1), sampling_key(1, 2, 4, 3)}
    assert len(keys) == 1 + 4 * 3 + 3
    assert all(0 <= key < 2**64 for key in keys)


def test_a_grid_of_sampling_keys_has_no_collision() -> None:
    keys = {sampling_key(42, step, row, sample) for step in range(20) for row in range(100) for sample in range(10)}
    assert len(keys) == 20_000


# Uniform numbers


def test_uniforms_are_the_top_53_bits_of_splitmix64() -> None:
    """Python's integers, which do not wrap around, give the same numbers as int64 tensors."""
    seeds = [0, 1, 2**63, 2**64 - 1, sampling_key(42, 0, 0, 0)]
    expected = [[(mix64(mix64(seed) + (j + 1) * GOLDEN) >> 11) * 2.0**-53 for j in range(7)] for seed in seeds]
    assert keyed_uniforms(seeds, 7).tolist() == expected


def test_uniforms_do_not_depend_on_the_other_seeds_or_on_how_many_are_drawn() -> None:
    together = keyed_uniforms([5, 6, 7], 9)
    assert torch.equal(keyed_uniforms([6], 4), together[1:2, :4])


def test_uniforms_are_uniform_and_independent_over_seeds_and_draws() -> None:
    """40,000 numbers: the mean's standard error is sqrt(1/12 / 40,000) = 0.00144, a correlation's is 1/200 = 0.005."""
    numbers = keyed_uniforms(list(range(200)), 200)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=5 * 0.00144)
    centred = (numbers - 0.5) * math.sqrt(12)
    assert (centred[1:] * centred[:-1]).mean().abs() < 5 * 0.005
    assert (centred[:, 1:] * centred[:, :-1]).mean().abs() < 5 * 0.005


# Tokens


def test_a_token_owns_its_probability_s_part_of_the_unit_interval() -> None:
    """0.5, 0.3, 0.2 own [0, 0.5), [0.5, 0.8), [0.8, 1)."""
    assert draw([0.5, 0.3, 0.2], [0.0, 0.49, 0.51, 0.79, 0.81, LAST_BELOW_1]) == [0, 0, 1, 1, 2, 2]


def test_sampled_frequencies_are_the_probabilities_at_the_temperature() -> None:
    """At T = 0.5, 0.5, 0.3, 0.2 become 25, 9 and 4 of 38; 20,000 draws err by at most 0.0034 (one sigma)."""
    uniforms = keyed_uniforms(list(range(20_000)), 1)[:, 0]
    ids = sample_tokens(HALF_THIRD_FIFTH.expand(20_000, -1), uniforms, temperature=0.5)
    frequencies = torch.bincount(ids, minlength=3) / 20_000
    assert frequencies.tolist() == pytest.approx([25 / 38, 9 / 38, 4 / 38], abs=4 * 0.0034)


def test_temperature_0_takes_the_likeliest_token() -> None:
    assert draw([0.2, 0.5, 0.3], [0.01, 0.99], temperature=0) == [1, 1]


def test_top_p_keeps_the_smallest_set_with_that_much_probability() -> None:
    """Tokens 1 and 3 hold 0.4 + 0.3 = 0.7 >= 0.6; they own 4/7 and 3/7, in the vocabulary's order."""
    assert draw([0.1, 0.4, 0.2, 0.3], [0.0, 0.57, 0.58, LAST_BELOW_1], top_p=0.6) == [1, 1, 3, 3]


def test_top_p_below_the_largest_probability_keeps_the_likeliest_token() -> None:
    assert draw([0.1, 0.4, 0.2, 0.3], [0.0, LAST_BELOW_1], top_p=0.01) == [1, 1]


def test_top_k_keeps_the_k_likeliest_tokens() -> None:
    assert draw([0.1, 0.4, 0.2, 0.3], [0.0, 0.57, 0.58, LAST_BELOW_1], top_k=2) == [1, 1, 3, 3]
    assert draw([0.1, 0.4, 0.2, 0.3], [0.05, 0.99], top_k=9) == draw([0.1, 0.4, 0.2, 0.3], [0.05, 0.99])


def test_top_p_acts_on_what_top_k_left() -> None:
    """Top-k 3 leaves 0.4, 0.3, 0.2 = 4/9, 3/9, 2/9; 7/9 >= 0.75 with two of them. Of the whole, 0.7 would not do."""
    assert draw([0.1, 0.4, 0.2, 0.3], [0.0, 0.57, 0.58, LAST_BELOW_1], top_k=3, top_p=0.75) == [1, 1, 3, 3]
    assert draw([0.1, 0.4, 0.2, 0.3], [LAST_BELOW_1], top_p=0.75) == [3]
    assert 2 in draw([0.1, 0.4, 0.2, 0.3], [0.5, 0.55, 0.6], top_p=0.75)


def test_a_token_of_probability_0_is_never_drawn() -> None:
    assert draw([0.0, 1.0, 0.0], [0.0, 0.5, LAST_BELOW_1]) == [1, 1, 1]


# Log-probs


def test_log_probs_are_those_of_the_full_vocabulary_where_top_p_cut_it() -> None:
    """NUM-02: log 0.5 = -0.6931; among the 0.8 that top-p keeps it would be log 0.625 = -0.4700."""
    [log_prob] = token_log_probs(HALF_THIRD_FIFTH, torch.tensor([0])).tolist()
    assert log_prob == pytest.approx(-0.6931, abs=1e-4)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.1429), (1.0, -0.4076), (0.0, -0.4076)])
def test_log_probs_divide_the_logits_by_the_temperature(temperature: float, expected: float) -> None:
    """NUM-01: logits 2, 1, 0; at 0.5 the first is -log(1 + e^-2 + e^-4) = -0.1429. Greedy is scored at 1."""
    [log_prob] = token_log_probs(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0]), temperature).tolist()
    assert log_prob == pytest.approx(expected, abs=1e-4)


def test_log_probs_of_bf16_logits_are_fp32() -> None:
    assert token_log_probs(torch.zeros(1, 3, dtype=torch.bfloat16), torch.tensor([0])).item() == pytest.approx(
        -math.log(3), abs=1e-6
    )
