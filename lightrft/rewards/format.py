"""Forms that a response is asked to have."""

import re
from collections.abc import Sequence

from lightrft.rewards.answers import THINK_CLOSE, THINK_OPEN, boxed


def format_tags(response: str, prompt: str = "", tags: Sequence[str] = ("think", "answer")) -> float:
    """1 where the response is `<think>...</think><answer>...</answer>` and nothing else but white space, else 0.

    Each tag stands exactly once, in order, and holds something.

    Args:
        response: The generated text.
        prompt: Where it ends with the first tag, as some chat templates do, that one is already open.
        tags: Their names, in order.
    """
    text = _with_opened(response, prompt, tags[0])
    if any(text.count(mark) != 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>")):
        return 0.0
    form = r"\s*".join(rf"<{re.escape(tag)}>(.*)</{re.escape(tag)}>" for tag in tags)
    whole = re.fullmatch(rf"\s*{form}\s*", text, re.DOTALL)
    return float(whole is not None and all(part.strip() for part in whole.groups()))


def think_and_box(response: str, prompt: str = "") -> float:
    """1 where the response is `<think>...</think>`, exactly once and at its start, and then has a closed box, else 0.

    Source: the format reward of verl's examples for Geometry3K, `<think>.*</think>.*\\boxed{.*}.*`.
    """
    text = _with_opened(response, prompt, "think").strip()
    if text.count(THINK_OPEN) != 1 or text.count(THINK_CLOSE) != 1 or not text.startswith(THINK_OPEN):
        return 0.0
    thoughts, _, rest = text.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return float(bool(thoughts.strip()) and any(boxed(rest)))


def _with_opened(response: str, prompt: str, tag: str) -> str:
    return f"<{tag}>{response}" if prompt.rstrip().endswith(f"<{tag}>") else response
