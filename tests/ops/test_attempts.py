"""Statistics over the responses to one prompt."""

from itertools import combinations

import pytest

from lightrft.ops.attempts import majority, pass_at_k, pass_sizes


@pytest.mark.parametrize(
    ("num_attempts", "num_passed", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),  # 1 - C(2,2)/C(4,2) = 1 - 1/6
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (4, 3, 2, 1.0),  # C(1,2) = 0: any two attempts hold one that passed.
        (4, 0, 4, 0.0),
        (1, 1, 1, 1.0),
    ],
)
def test_pass_at_k_is_equation_1(num_attempts, num_passed, k, expected):
    assert pass_at_k(num_attempts, num_passed, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_the_share_of_subsets_that_hold_an_attempt_that_passed():
    passed = [True, False, False, True, False, False, False]
    for k in range(1, 8):
        subsets = list(combinations(passed, k))
        assert pass_at_k(7, 2, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_a_thousand_attempts_is_exact_enough():
    """1 - C(999,500)/C(1000,500) = 1 - 500/1000, of numbers with 300 digits."""
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5, abs=1e-15)


@pytest.mark.parametrize(("num_attempts", "num_passed", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0), (2, -1, 1)])
def test_impossible_counts_are_refused(num_attempts, num_passed, k):
    with pytest.raises(ValueError, match=f"k={k}, {num_passed} of {num_attempts}"):
        pass_at_k(num_attempts, num_passed, k)


def test_the_sizes_double_up_to_the_number_of_attempts():
    assert [pass_sizes(n) for n in (1, 2, 3, 4, 5, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 5],
        [1, 2, 4, 8],
    ]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["7", "12", "12", "9"], 1),
        (["7", "12", "12", "7"], 0),  # Two each: 7 was seen first.
        (["3", "1", "2"], 0),
        (["3"], 0),
    ],
)
def test_the_majority_is_the_first_attempt_with_the_most_frequent_answer(answers, expected):
    assert majority(answers) == expected
