"""Collectives: the only place that calls those of torch.distributed, each recorded in the trace."""

import io
import pickle
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.strategy.utils.distributed_util import format_ranks
from lightrft.strategy.utils.trace import CollectiveTrace, OpenSite

ReduceOp: TypeAlias = Literal["sum", "max", "min"]
Group: TypeAlias = dist.ProcessGroup | None

# PyTorch 2.13 renames it, and warns of the old name.
_TORCH_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_all_gather_single = dist.all_gather_single if _TORCH_VERSION >= (2, 13) else dist.all_gather_into_tensor
GENERATION = "generation"
"""The phase of all engines at whose end ranks wait for the slowest."""
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class PhaseError(RuntimeError):
    """A phase failed on some rank; raised on all ranks, with the failing ranks' tracebacks in its message."""


class Collectives:
    """Collectives of the default process group, which must be initialised, or of a group of it.

    All ranks of the group call each method, in the same order. Values and objects travel as CPU tensors, so groups on
    CUDA need the backend `cpu:gloo,cuda:nccl`; CUDA tensors are reduced asynchronously.
    """

    def __init__(self, device: torch.device, trace: CollectiveTrace | None = None) -> None:
        self.device = device
        self.trace = trace if trace is not None else CollectiveTrace()
        self.waited: defaultdict[str, float] = defaultdict(float)
        """Seconds that this rank waited for the others at the ends of phases, by phase."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def site(self, name: str) -> OpenSite:
        """Context that marks any other section in which ranks wait for each other: a sharded forward or backward."""
        return self.trace.site(name)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", group: Group = None) -> Tensor:
        """`tensor` itself, reduced in place."""
        with self.site(f"all_reduce({op})"):
            dist.all_reduce(tensor, op=_REDUCE_OPS[op], group=group)
        return tensor

    def all_reduce_sum(self, values: Sequence[float], group: Group = None) -> list[float]:
        """Sums over ranks in float64: counts stay exact up to 2^53."""
        return self._reduce_values(values, "sum", group)

    def all_reduce_max(self, values: Sequence[float], group: Group = None) -> list[float]:
        return self._reduce_values(values, "max", group)

    def _reduce_values(self, values: Sequence[float], op: ReduceOp, group: Group) -> list[float]:
        return self.all_reduce(torch.tensor(values, dtype=torch.float64), op, group).tolist()

    def all_gather_rows(self, rows: Tensor, group: Group = None) -> Tensor:
        """`rows` itself, `(ranks, n)`, of which each rank has filled its own; on a CUDA device it is asynchronous."""
        with self.site("all_gather"):
            _all_gather_single(rows.view(-1), rows[dist.get_rank(group)], group=group)
        return rows

    def broadcast(self, tensor: Tensor, src: int = 0, group: Group = None) -> Tensor:
        """`tensor` itself, filled in place from global rank `src`."""
        with self.site("broadcast"):
            dist.broadcast(tensor, src=src, group=group)
        return tensor

    def barrier(self, group: Group = None) -> None:
        """Wait on the host until every rank of the group is here; work queued on devices may go on."""
        with self.site("barrier"):
            # dist.barrier would take NCCL where it can, and open a communicator on a guessed device.
            dist.all_reduce(torch.zeros(1), group=group)

    def all_gather_objects(self, obj: Any, group: Group = None) -> list[Any]:
        """Every rank's object, in the order of the group's ranks."""
        return self._gather("all_gather_objects", obj, group)

    def _gather(self, site: str, obj: Any, group: Group = None) -> list[Any]:
        gathered = [None] * dist.get_world_size(group)
        with self.site(site):
            dist.all_gather_object(gathered, obj, group=group)
        return gathered

    def broadcast_object(self, obj: Any, src: int = 0, group: Group = None) -> Any:
        """The object of global rank `src`; what other ranks pass is ignored."""
        box = [obj]
        with self.site("broadcast_object"):
            dist.broadcast_object_list(box, src=src, group=group)
        return box[0]

    def all_to_all_objects(self, objects: Sequence[Any]) -> list[Any]:
        """What each rank had for this one, in rank order; `objects[i]` goes to rank i.

        Tensors inside travel with their values alone: they arrive on the CPU, without a graph.
        """
        assert len(objects) == self.world_size
        payloads = [_to_bytes(obj) for obj in objects]
        sizes = [len(payload) for payload in payloads]
        with self.site("all_to_all_objects"):
            incoming = torch.empty(self.world_size, dtype=torch.int64)
            dist.all_to_all_single(incoming, torch.tensor(sizes))
            incoming_sizes = incoming.tolist()
            received = torch.empty(sum(incoming_sizes), dtype=torch.uint8)
            sent = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8)
            dist.all_to_all_single(received, sent, incoming_sizes, sizes)
        return [pickle.loads(part.numpy().data) for part in received.split(incoming_sizes)]

    def agree(self, error: BaseException | None, phase: str) -> None:
        """End of a phase: every rank calls it, with what went wrong on it.

        Raises:
            PhaseError: on every rank, if any rank has an error; a failing rank's own error is its cause.
        """
        failed = torch.tensor(error is not None, dtype=torch.int32)
        started = time.perf_counter()
        with self.site(phase):
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        self.waited[phase] += time.perf_counter() - started
        if not failed:
            return
        text = None if error is None else "".join(traceback.format_exception(error))
        texts = self._gather(phase, text)
        failures = {rank: text for rank, text in enumerate(texts) if text is not None}
        raise PhaseError(_describe_failures(phase, failures, self.world_size)) from error

    def collect(self, phase: str) -> "Collect":
        """Context of a phase whose body may fail on one rank alone: collect, agree, raise.

        The body holds no collective; ranks meet at its end, where `agree` raises on all or on none.
        """
        return Collect(self.agree, phase)


class Collect:
    """Context that hands the exception of its body, or None, to `agree`."""

    def __init__(self, agree: Callable[[BaseException | None, str], None], phase: str) -> None:
        self._agree = agree
        self._phase = phase

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A PhaseError is already raised on all ranks; a KeyboardInterrupt or SystemExit is this process's own end.
        if isinstance(error, PhaseError) or not isinstance(error, Exception | None):
            return
        self._agree(error, self._phase)


def _describe_failures(phase: str, failures: dict[int, str], world_size: int) -> str:
    """Message with each distinct traceback once."""
    ranks_of_text: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks_of_text.setdefault(text, []).append(rank)
    tracebacks = [f"--- {format_ranks(ranks)} ---\n{text}" for text, ranks in ranks_of_text.items()]
    return "\n".join([f"{phase} failed on {format_ranks(failures)} of {world_size}.", *tracebacks])


class _Pickler(pickle.Pickler):
    """Pickles a tensor by its own bytes: torch would write the whole storage that a slice looks into."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor:
            return NotImplemented
        values = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _to_tensor, (values.numpy().tobytes(), obj.dtype, tuple(obj.shape))


def _to_tensor(values: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not values:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(values), dtype=dtype).reshape(shape)


def _to_bytes(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()
