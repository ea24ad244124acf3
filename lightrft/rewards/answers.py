"""Answers: what a response states as its result."""

import re
from collections.abc import Iterator

OPEN, CLOSE = "<answer>", "</answer>"
BRACES = re.compile(r"\\boxed\s*\{|[{}]")
MARKED = re.compile(r"####([^\n]*)")


def answer_of(response: str) -> str:
    """The result alone, without white space around it: inside the last <answer> tags, where there are any, the last
    \\boxed{}, else what follows the last ####, else the whole text.
    """
    text = tagged(response)
    found = [*boxed(text)] or MARKED.findall(text) or [text]
    return found[-1].strip()


def tagged(text: str) -> str:
    """What the last pair of tags holds, or the whole text without one."""
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, max(end, 0))
    return text if start < 0 else text[start + len(OPEN) : end]


def boxed(text: str) -> Iterator[str]:
    """Contents of each \\boxed{} whose braces are balanced, in the order in which they close."""
    # One pass over the braces: a response may be nothing but opened boxes.
    opened: list[int | None] = []
    for brace in BRACES.finditer(text):
        if brace.group() != "}":
            opened.append(None if brace.group() == "{" else brace.end())
        elif opened and (start := opened.pop()) is not None:
            yield text[start : brace.start()]
