"""Texts that are the answer themselves."""

from typing import Any

from lightrft.rewards.answers import answer_of
from lightrft.rewards.records import Ungradable


def exact(response: str, gold: Any, ignore_case: bool = False) -> float:
    """1 where the answer (in tags, in a box, behind ####, or the whole response) is the gold text, else 0.

    Runs of white space are one space.

    Raises:
        Ungradable: The gold text is empty.
    """
    return float(_plain(answer_of(response), ignore_case) == _gold(gold, ignore_case))


def fuzzy(response: str, gold: Any, ignore_case: bool = False, threshold: float = 0.0) -> float:
    """How like the gold text the answer is: 1 - edit distance / length of the longer one, 0 below the threshold.

    Raises:
        Ungradable: The gold text is empty.
    """
    answer, expected = _plain(answer_of(response), ignore_case), _gold(gold, ignore_case)
    similarity = 1.0 - edit_distance(answer, expected) / max(len(answer), len(expected))
    return similarity if similarity >= threshold else 0.0


def edit_distance(text: str, other: str) -> int:
    """Fewest characters to insert, delete and replace (Levenshtein).

    Source: Hyyrö, "A Bit-Vector Algorithm for Computing Levenshtein and Damerau Edit Distances" (2003), fig. 3: the
    vertical differences of a whole column of the table in the bits of two numbers, so that pages of text take
    milliseconds.
    """
    if not text:
        return len(other)
    size = len(text)
    everything, last = (1 << size) - 1, 1 << (size - 1)
    places: dict[str, int] = {}
    for index, character in enumerate(text):
        places[character] = places.get(character, 0) | 1 << index
    positive, negative, distance = everything, 0, size
    for character in other:
        same = places.get(character, 0)
        diagonal = ((((same & positive) + positive) ^ positive) | same | negative) & everything
        rises = (negative | ~(diagonal | positive)) & everything
        falls = positive & diagonal
        distance += bool(rises & last) - bool(falls & last)
        rises = (rises << 1 | 1) & everything
        falls = falls << 1 & everything
        positive = (falls | ~(diagonal | rises)) & everything
        negative = rises & diagonal
    return distance


def _plain(text: str, ignore_case: bool) -> str:
    plain = " ".join(text.split())
    return plain.casefold() if ignore_case else plain


def _gold(gold: Any, ignore_case: bool) -> str:
    text = _plain("" if gold is None else str(gold), ignore_case)
    if not text:
        raise Ungradable(f"A gold text must not be empty: {gold!r}.")
    return text
