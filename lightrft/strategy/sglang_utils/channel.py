"""Channel: from a rank to its shard of the engine's model, over which it sends weights on the same device."""

import socket
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lightrft.strategy.sglang_utils.mapped_file import MediaFile, TensorPlace
from lightrft.strategy.sglang_utils.shard import Load, Read, Request, Stage, StagedWeight, Verify, staged
from lightrft.types import WeightBucket, WeightSpec

_ALIGNMENT = 256


class ShardChannel:
    """The rank's end of it: a socket that the scheduler process calls, for one round of weights at a time.

    A weight is copied once, into a staging buffer that the scheduler has mapped: memory that belongs to the actor is
    never shared, since PyTorch keeps a record of every time that it shares a tensor for as long as the tensor lives.
    """

    def __init__(self, address: Path, device: torch.device, staging_bytes: int) -> None:
        """`staging_bytes` must hold the largest weight."""
        self.address = str(address)
        self._device = device
        self.staging_bytes = staging_bytes
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(1)
        self._connection: Connection | None = None
        self._staging: torch.Tensor | None = None
        self._waiting: list[StagedWeight] = []
        """In the staging buffer, for the next time that the shard loads."""
        self._end = 0
        """Behind the last of them."""

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def accept(self, seconds: float) -> bool:
        """Whether the scheduler has called, within so many seconds."""
        if self.is_open:
            return True
        self._listener.settimeout(seconds)
        try:
            peer, _ = self._listener.accept()
        except TimeoutError:
            return False
        peer.settimeout(None)
        self._connection = Connection(peer.detach())
        return True

    def hang_up(self) -> None:
        """Lets the scheduler go on."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def free(self) -> None:
        """Gives the staging buffer back. Comes when the scheduler has gone on: what it has mapped stays."""
        self._staging = None
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def ask(self, request: Request) -> Any:
        """What the shard answers.

        Raises:
            RuntimeError: It failed, with its traceback, or its process has ended.
            NotImplementedError: It refuses the model.
        """
        assert self._connection is not None, "accept comes first"
        try:
            self._connection.send(request)
            kind, content = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("SGLang's scheduler has ended while it took weights; its error is above.") from error
        if kind == "refusal":
            raise NotImplementedError(content)
        if kind == "error":
            raise RuntimeError(f"SGLang's scheduler could not take weights:\n{content}")
        return content

    def check_sharing(self) -> None:
        """Raises RuntimeError where the machine does not let the scheduler map this rank's memory."""
        try:
            self.ask(Stage(torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=self._device)))
        except RuntimeError as error:
            raise RuntimeError(
                f"SGLang's scheduler must be able to map the rank's memory on the GPU (CUDA IPC): {error}\nStart the "
                "container with --ipc=host and --cap-add=SYS_PTRACE, or set --engine_type vllm."
            ) from error

    def check_files(self, folder: Path) -> None:
        """Raises RuntimeError where the scheduler may not open what this rank has open, as media come to it."""
        with MediaFile.opened(folder) as file:
            try:
                numbers = self.ask(Read(TensorPlace(file.add(torch.arange(3)))))
            except RuntimeError as error:
                raise RuntimeError(
                    f"SGLang's scheduler must be able to open the rank's files by /proc/PID/fd: {error}\nMount /proc "
                    "without hidepid, run a python without capabilities of its own, or set --engine_type vllm."
                ) from error
        assert numbers == [0, 1, 2]

    def drop_waiting(self) -> list[str]:
        """Names of the weights that waited in the staging buffer, and will not be loaded."""
        dropped, self._waiting, self._end = self._waiting, [], 0
        return [weight.spec.name for weight in dropped]

    def load(self, bucket: WeightBucket) -> None:
        """Copies the weights; the shard loads them once the staging buffer is full."""
        for weights in self._staged(bucket):
            self.ask(Load(weights))

    def finish_loads(self) -> None:
        """The shard loads what still waits in the staging buffer."""
        if self._waiting:
            self.ask(Load(self._taken()))

    def verify(self, bucket: WeightBucket) -> list[str]:
        """Names of the weights that the shard does not hold bit by bit, now that all are loaded."""
        self.finish_loads()
        changed = [name for weights in self._staged(bucket) for name in self.ask(Verify(weights))]
        return changed + (self.ask(Verify(self._taken())) if self._waiting else [])

    def _staged(self, bucket: WeightBucket) -> Iterator[Sequence[StagedWeight]]:
        """Copies the bucket's weights behind those that wait, and gives these whenever the next one has no room.

        Each time that the shard loads costs a millisecond or two on a GPU, however little: a full buffer is few times.
        """
        if self._staging is None:
            self._staging = torch.empty(self.staging_bytes, dtype=torch.uint8, device=self._device)
            self.ask(Stage(self._staging))
        tensors = dict(bucket)
        for number, weights in enumerate(layouts(bucket, self.staging_bytes, self._end)):
            if number > 0:
                yield self._taken()
            if weights:
                targets = [staged(self._staging, weight) for weight in weights]
                with torch.no_grad():
                    torch._foreach_copy_(targets, [tensors[weight.spec.name] for weight in weights])
                self._waiting += weights
                self._end = weights[-1].offset + _aligned(weights[-1].spec.num_bytes)

    def _taken(self) -> list[StagedWeight]:
        """The weights that wait, which are there for the scheduler; the next ones are written over them."""
        if self._device.type == "cuda":
            # The scheduler's stream knows nothing of this one.
            torch.cuda.current_stream(self._device).synchronize()
        taken, self._waiting, self._end = self._waiting, [], 0
        return taken


def staging_size(largest_bytes: int, bucket_bytes: int) -> int:
    """Bytes of a staging buffer: a quarter of a bucket, or the largest weight."""
    return max(bucket_bytes // 4, _aligned(largest_bytes))


def layouts(bucket: WeightBucket, staging_bytes: int, start: int = 0) -> Iterator[list[StagedWeight]]:
    """Runs of the bucket's weights, each weight with its place in the staging buffer.

    The first run lies behind what is there up to `start`, and is empty where nothing fits there; each other one is
    written over the one before it.
    """
    run: list[StagedWeight] = []
    end = start
    for name, tensor in bucket:
        size = _aligned(tensor.nbytes)
        assert size <= staging_bytes, f"{name} does not fit into the staging buffer"
        if end + size > staging_bytes:
            yield run
            run, end = [], 0
        run.append(StagedWeight(WeightSpec(name, tuple(tensor.shape), tensor.dtype), end))
        end += size
    if run:
        yield run


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
