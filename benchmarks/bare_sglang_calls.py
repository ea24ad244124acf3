"""What a benchmark calls in SGLang's own process, which knows a function by its module."""

from collections.abc import Mapping, Sequence
from typing import Any

_drawn: list[Any] = []
"""What the latest call drew."""


def draw(engine: Any, prompts: Sequence[list[int]], sampling: Mapping[str, Any]) -> None:
    _drawn[:] = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)


def drawn(engine: Any) -> list[tuple[list[int], str, list[float]]]:
    """Token ids, finish reasons and log-probs."""
    return [
        (result["output_ids"], "length", [value for value, *_ in result["meta_info"]["output_token_logprobs"]])
        for result in _drawn
    ]
