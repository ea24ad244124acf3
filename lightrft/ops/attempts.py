"""Attempts: what several responses to one prompt say together."""

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb


def pass_at_k(num_attempts: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of `k` attempts passes.

    Source: M. Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1.

    Raises:
        ValueError: there are fewer attempts than k, or more passed than there are.
    """
    if not 1 <= k <= num_attempts or not 0 <= num_passed <= num_attempts:
        raise ValueError(
            "pass@k needs k from 1 to the attempts, and passed ones among them: "
            f"k={k}, {num_passed} of {num_attempts} passed."
        )
    return 1 - comb(num_attempts - num_passed, k) / comb(num_attempts, k)


def pass_sizes(num_attempts: int) -> list[int]:
    """The k of pass@k: 1, 2, 4, ... below the number of attempts, and that number."""
    return [2**i for i in range((num_attempts - 1).bit_length())] + [num_attempts]


def majority(answers: Sequence[Hashable]) -> int:
    """Index of the first attempt that gives the most frequent answer; of equally frequent ones the first seen wins."""
    [(answer, _)] = Counter(answers).most_common(1)
    return answers.index(answer)
