"""The books of a round of weight updates."""

import pytest
import torch

from lightrft.strategy.utils.weight_round import WeightRound
from lightrft.types import WeightSpec


def test_a_weight_that_was_given_and_did_not_arrive_is_missing() -> None:
    weights = {name: torch.zeros(2) for name in "ab"}
    specs = [WeightSpec(name, (2,), torch.float32) for name in weights]
    books = WeightRound({name: (2,) for name in weights})
    books.open(specs)
    books.note(list(weights.items()))
    books.miss(["b"])
    with pytest.raises(RuntimeError, match=r"got no update: b\."):
        books.close()
    books.note([("b", weights["b"])])
    books.close()
