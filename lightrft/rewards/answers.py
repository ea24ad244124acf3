"""Answers: what a response states as its result."""

import re
from collections.abc import Iterator

OPEN, CLOSE = "<answer>", "</answer>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
BRACES = re.compile(r"(?P<escaped>(?<!\\)\\[{}])|(?P<box>\\(?:boxed|fbox)\s*\{)|[{}]")
OPENED_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
MARKED = re.compile(r"####([^\n]*)")


def answer_of(response: str) -> str:
    """The result alone, without white space around it: inside the last <answer> tags, where there are any, the last
    \\boxed{} or \\fbox{}, else what follows the last ####, else the whole text. Thoughts hold no result, but are the
    whole text where nothing follows them.
    """
    text = tagged(after_thinking(response)) or response
    found = [*boxed(text)] or MARKED.findall(text) or [text]
    return found[-1].strip()


def after_thinking(text: str) -> str:
    """What follows the last </think>; thoughts that do not end are cut off."""
    closed = text.rfind(THINK_CLOSE)
    rest = text if closed < 0 else text[closed + len(THINK_CLOSE) :]
    opened = rest.find(THINK_OPEN)
    return rest if opened < 0 else rest[:opened]


def tagged(text: str) -> str:
    """What the last pair of tags holds, or the whole text without one."""
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, max(end, 0))
    return text if start < 0 else text[start + len(OPEN) : end]


def boxed(text: str) -> Iterator[str]:
    """Contents of each \\boxed{} or \\fbox{} whose braces are balanced, in the order in which they close."""
    # One pass over the braces: a response may be nothing but opened boxes.
    opened: list[int | None] = []
    for brace in BRACES.finditer(text):
        if brace["escaped"]:
            continue
        if brace.group() != "}":
            opened.append(brace.end() if brace["box"] else None)
        elif opened and (start := opened.pop()) is not None:
            yield text[start : brace.start()]
