"""Rows to be rewarded."""

from typing import Any

from lightrft.rewards.records import RewardInput


def row(number: int, **fields: Any) -> RewardInput:
    """Row `number`, whose response is the number."""
    defaults: dict[str, Any] = {
        "prompt": f"{number}+0=",
        "response": str(number),
        "label": str(number),
        "reference": None,
        "extra": {},
        "row": number,
        "finish_reason": "stop",
    }
    return RewardInput(**defaults | fields)
