"""Shard: the part of the model that one scheduler process of SGLang holds, served to the rank with its weights."""

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from lightrft.strategy.sglang_utils.mapped_file import TensorPlace
from lightrft.strategy.utils.devices import storage_bytes
from lightrft.strategy.utils.weight_loading import WeightLoading, changed_weights, check_one_to_one, load
from lightrft.types import WeightBucket, WeightSpec


@dataclass(frozen=True)
class StagedWeight:
    """Where a weight lies in the staging buffer."""

    spec: WeightSpec
    offset: int


@dataclass(frozen=True)
class Stage:
    """Comes before weights do."""

    staging: Tensor
    """Bytes, shared by the rank: it is mapped into this process, not copied."""


@dataclass(frozen=True)
class Load:
    weights: Sequence[StagedWeight]


@dataclass(frozen=True)
class Verify:
    """Answered with the names of the weights that this shard does not hold bit by bit."""

    weights: Sequence[StagedWeight]


@dataclass(frozen=True)
class CheckOneToOne:
    specs: Sequence[WeightSpec]


@dataclass(frozen=True)
class Measure:
    """Answered with the bytes of the shard's weights and buffers."""


@dataclass(frozen=True)
class Read:
    """Answered with the numbers of a tensor in the rank's file, as media come."""

    place: TensorPlace


Request: TypeAlias = Stage | Load | Verify | CheckOneToOne | Measure | Read


def serve(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Does what the rank at the address asks, as SGLang's custom weight loader, until it hangs up.

    SGLang has no way to say which weights it did not know or does not hold, and its loaders end the scheduler where
    they fail; so that SGLang's own part is to call this once for a round of updates.

    Args:
        model: SGLang's.
        named_tensors: The address of the rank's socket, in the place of a name, and nothing.
    """
    [(address, _)] = named_tensors
    with Client(address, "AF_UNIX") as channel:
        serve_rank(model, channel)


def serve_rank(model: WeightLoading, channel: Connection) -> None:
    shard = Shard(model)
    while True:
        try:
            request = channel.recv_bytes()
        except (EOFError, OSError):
            return
        # It is the rank's to end the run: a scheduler that fails says nothing to it.
        try:
            answer = "answer", shard.answer(pickle.loads(request))
        except NotImplementedError as error:
            answer = "refusal", str(error)
        except Exception:
            answer = "error", traceback.format_exc()
        channel.send(answer)


class Shard:
    """Answers requests, one after the other."""

    def __init__(self, model: WeightLoading) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._staging = torch.empty(0, dtype=torch.uint8)

    def answer(self, request: Request) -> Any:
        match request:
            case Stage(staging):
                self._staging = staging
            case Load(weights):
                load(self._model, self._bucket(weights))
                # The rank may write over them then.
                self._wait()
            case Verify(weights):
                changed = changed_weights(self._model, self._bucket(weights))
                self._wait()
                return changed
            case CheckOneToOne(specs):
                check_one_to_one(self._model, specs, self._device, "SGLang")
            case Read(tensor):
                # It has become the tensor on its way.
                return cast(Tensor, tensor).tolist()
            case Measure():
                module: Any = self._model
                return storage_bytes([*module.parameters(), *module.buffers()], self._device)

    def _bucket(self, weights: Sequence[StagedWeight]) -> WeightBucket:
        return [(weight.spec.name, staged(self._staging, weight)) for weight in weights]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def staged(staging: Tensor, weight: StagedWeight) -> Tensor:
    """The weight, as a view of the staging buffer."""
    spec = weight.spec
    return staging[weight.offset : weight.offset + spec.num_bytes].view(spec.dtype).view(spec.shape)
