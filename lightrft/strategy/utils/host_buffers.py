"""Host buffers: where tensors that leave the device wait, allocated once and used again."""

from collections.abc import Hashable

import torch
from torch import Tensor, nn


class HostBuffers:
    """Copies of tensors of one rank's device on the host, page-locked, so that they travel at full speed.

    On a rank without a device of its own the host is where everything lives, and nothing moves.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[Hashable, Tensor] = {}

    @torch.no_grad()
    def model_to_host(self, model: nn.Module) -> None:
        """Moves parameters and buffers, through `_apply`, so that what FSDP2 remembers of its shards moves as well."""
        # Parameters stay the same objects, and are their buffers' keys; a tied one is met again on the host.
        model._apply(lambda tensor: self.to_host(tensor if isinstance(tensor, nn.Parameter) else None, tensor))
        self.wait()

    @torch.no_grad()
    def model_to_device(self, model: nn.Module) -> None:
        model._apply(self.to_device)
        self.wait()

    def to_host(self, key: Hashable | None, tensor: Tensor) -> Tensor:
        """The tensor's copy on the host, complete after `wait`; without a key its memory is not used again."""
        if tensor.device.type == "cpu":
            return tensor
        if key is None:
            return tensor.to("cpu")
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        return self._buffers[key].copy_(tensor, non_blocking=True)

    def to_device(self, tensor: Tensor) -> Tensor:
        """The tensor's copy on the device, complete after `wait`."""
        return tensor.to(self.device, non_blocking=True)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
