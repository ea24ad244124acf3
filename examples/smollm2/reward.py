"""The example's reward."""

import re
from collections.abc import Mapping

TAGGED_NUMBER = re.compile(r"<answer>([0-9]+)</answer>")


def tagged_answer(response: str, label: str, finish_reason: str) -> Mapping[str, float]:
    """1 for a finished response that is the label in its tags and nothing else, 0 for any other.

    `format` is 1 for any number in the tags: it tells a wrong sum from an answer of another form.
    """
    match = TAGGED_NUMBER.fullmatch(response) if finish_reason == "stop" else None
    accuracy = float(match is not None and match[1] == label)
    return {"score": accuracy, "accuracy": accuracy, "format": float(match is not None)}
