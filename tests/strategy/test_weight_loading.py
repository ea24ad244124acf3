"""What an engine's weight loaders write, on a small model with loaders like theirs."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from lightrft.strategy.utils.weight_loading import changed_weights, check_one_to_one, load
from lightrft.types import WeightSpec


class FusedModel(nn.Module):
    """q over k in one matrix, a vocabulary of 3 padded to 4, a norm; a tensor remembers which part it was."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(4, 2, dtype=dtype), requires_grad=False)
        self.embedding = nn.Parameter(torch.zeros(4, 2, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return {self.load_weight(name, weight) for name, weight in weights}

    def load_weight(self, name: str, weight: Tensor) -> str:
        match name:
            case "q" | "k":
                weight.part = name
                self.qk.data.narrow(0, 0 if name == "q" else 2, 2).copy_(weight)
            case "embedding":
                self.embedding[:3].data.copy_(weight)
                self.embedding[3:].data.fill_(0)
            case "norm":
                # Not the tensor that was sent, as where a loader rearranges it.
                self.norm.data.copy_(weight.flip(0).clone())
            case _:
                raise KeyError(name)
        return name


class DeafModel(FusedModel):
    """Takes k, and does nothing with it."""

    def load_weight(self, name: str, weight: Tensor) -> str:
        return name if name == "k" else super().load_weight(name, weight)


class UnwatchedModel(FusedModel):
    """Writes k by an operation that is no copy."""

    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.write = write

    def load_weight(self, name: str, weight: Tensor) -> str:
        if name != "k":
            return super().load_weight(name, weight)
        self.write(self.qk.data[2:], weight)
        return name


WEIGHTS = {
    "q": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "k": torch.tensor([[5.0, 6.0], [7.0, 8.0]]),
    "embedding": torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]),
    "norm": torch.tensor([0.0, 1.0]),
}
SPECS = [WeightSpec(name, tuple(weight.shape), torch.float32) for name, weight in WEIGHTS.items()]
CPU = torch.device("cpu")


def test_weights_reach_their_places_and_stay_the_caller_s() -> None:
    """WGT-07, WGT-08: bf16 has 8 significant bits, so 1.2345678 becomes 158/128 = 1.234375."""
    model = FusedModel(torch.bfloat16)
    weights = dict(WEIGHTS, q=torch.full((2, 2), 1.2345678))
    load(model, list(weights.items()))
    assert model.qk.tolist() == [[1.234375, 1.234375]] * 2 + [[5, 6], [7, 8]]
    assert weights["q"].unique().item() == pytest.approx(1.2345678)
    assert not any("part" in vars(weight) for weight in weights.values())


def test_weights_that_are_there_already_change_nothing() -> None:
    model = FusedModel()
    load(model, list(WEIGHTS.items()))
    assert changed_weights(model, list(WEIGHTS.items())) == []


@pytest.mark.parametrize(
    "name, parameter, place",
    [("k", "qk", (3, 1)), ("q", "qk", (0, 0)), ("embedding", "embedding", (2, 0)), ("norm", "norm", (1,))],
)
def test_a_number_that_was_changed_is_found_under_the_name_of_its_weight(name, parameter, place) -> None:
    model = FusedModel()
    load(model, list(WEIGHTS.items()))
    model.get_parameter(parameter)[place] += 2.0**-20
    assert changed_weights(model, list(WEIGHTS.items())) == [name]
    assert changed_weights(model, list(WEIGHTS.items())) == []


def test_bits_are_compared_and_not_numbers() -> None:
    """-0 equals 0 and is not the same; NaN is the same and does not equal itself."""
    model = FusedModel()
    weights = list(dict(WEIGHTS, norm=torch.tensor([torch.nan, 0.0])).items())
    load(model, weights)
    assert changed_weights(model, weights) == []
    model.norm[0] = -0.0
    assert changed_weights(model, weights) == ["norm"]


def test_a_weight_that_the_loaders_drop_is_named() -> None:
    model = DeafModel()
    load(model, list(WEIGHTS.items()))
    assert changed_weights(model, list(WEIGHTS.items())) == ["k"]


@pytest.mark.parametrize(
    "write",
    [
        lambda target, weight: torch._foreach_copy_([target], [weight]),
        lambda target, weight: target.index_copy_(0, torch.tensor([0, 1]), weight),
        lambda target, weight: torch.add(weight, 0, out=target),
    ],
)
def test_a_loader_that_writes_unseen_is_refused_and_never_trusted(write) -> None:
    """Only copies are watched; at the start, and in each check, what was written otherwise has reached nothing."""
    model = UnwatchedModel(write)
    with pytest.raises(NotImplementedError, match=r"one to one: k reaches no parameter\. Set"):
        check_one_to_one(model, SPECS, CPU, "The engine")
    load(model, list(WEIGHTS.items()))
    assert changed_weights(model, list(WEIGHTS.items())) == ["k"]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_weight_that_comes_in_slices_is_watched_whole(rows) -> None:
    """By indexing, and through a flat view of the parameter."""

    def write(target: Tensor, weight: Tensor) -> None:
        for i in range(0, 2, rows):
            target[i : i + rows] = weight[i : i + rows]
        target.view(-1)[3:].copy_(weight.reshape(-1)[3:])

    model = UnwatchedModel(write)
    check_one_to_one(model, SPECS, CPU, "The engine")
    load(model, list(WEIGHTS.items()))
    assert changed_weights(model, list(WEIGHTS.items())) == []
    model.qk[2, 1] += 1.0
    assert changed_weights(model, list(WEIGHTS.items())) == ["k"]


def test_weights_in_one_block_of_memory_are_told_apart() -> None:
    """As they come from one gather of a whole layer."""
    block = torch.arange(8.0).view(4, 2)
    model = FusedModel()
    load(model, [("q", block[:2]), ("k", block[2:])])
    model.qk[2, 0] = 0.0
    assert changed_weights(model, [("q", block[:2]), ("k", block[2:])]) == ["k"]


def test_a_model_that_takes_every_weight_and_has_no_other_is_one_to_one() -> None:
    check_one_to_one(FusedModel(), SPECS, CPU, "The engine")


def test_weights_without_a_place_and_places_without_a_weight_are_named() -> None:
    """WGT-01."""
    with pytest.raises(NotImplementedError, match=r"no parameter; qk is reached by no weight, or in part\. Set"):
        check_one_to_one(DeafModel(), SPECS, CPU, "The engine")
    with pytest.raises(NotImplementedError, match=r"one to one: norm is reached by no weight, or in part\. Set"):
        check_one_to_one(FusedModel(), [spec for spec in SPECS if spec.name != "norm"], CPU, "The engine")


@pytest.mark.parametrize("spec", [WeightSpec("v", (2, 2), torch.float32), WeightSpec("q", (3, 2), torch.float32)])
def test_what_the_loaders_refuse_is_said_in_their_words(spec) -> None:
    with pytest.raises(NotImplementedError, match=r"its loaders fail \((KeyError: 'v'|RuntimeError: .*size).* Set"):
        check_one_to_one(FusedModel(), [*SPECS, spec], CPU, "The engine")
