"""Role loading: a role that has no weights yet, and the weights that rank 0 reads for it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrft.config import Config
from lightrft.models.freezing import frozen_names
from lightrft.models.loading import Kind, LoadedConfig, empty_model, pretrained_weights
from lightrft.models.weights import persistent_tensors
from lightrft.strategy.utils.collectives import Collectives


def empty_role(
    config: Config,
    loaded: LoadedConfig,
    kind: Kind,
    dtype: torch.dtype,
    build: Callable[[PreTrainedModel], nn.Module],
    trainable: bool,
) -> nn.Module:
    """The role that `build` makes around a pretrained model: parameters on the meta device, and real buffers."""
    hf_model = empty_model(loaded, kind, dtype)
    if trainable and config.model.gradient_checkpointing:
        # Its name from transformers 5.24 on, which warns of the old one.
        enable = getattr(hf_model, "activation_checkpointing_enable", hf_model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    with torch.device("meta"):
        role = build(hf_model)
    if not trainable:
        role.requires_grad_(False)
    for name in frozen_names(hf_model, config.model.freeze_prefix):
        hf_model.get_parameter(name).requires_grad_(False)
    return role.train(trainable)


class SentWeights:
    """The weights of a pretrained model: rank 0 reads them all, and sends them one by one.

    Every rank must make it, and call it alike.

    Raises:
        PhaseError: On all ranks, where rank 0 could not read every weight of `hf_model`.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        kind: Kind,
        dtype: torch.dtype,
        hf_model: PreTrainedModel,
        collectives: Collectives,
    ) -> None:
        self.collectives = collectives
        self._unsent: dict[str, Tensor] = {}
        with collectives.collect(f"loading {loaded.pretrain}"):
            if collectives.rank == 0:
                self._unsent = pretrained_weights(loaded, kind, dtype)
                if absent := [name for name, _ in persistent_tensors(hf_model) if name not in self._unsent]:
                    raise ValueError(f"{loaded.pretrain} lacks {', '.join(absent[:5])}")

    def whole(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The full weight on this rank's device, cast; it comes once."""
        full = torch.empty(shape, dtype=dtype, device=self.collectives.device)
        if self.collectives.rank == 0:
            full.copy_(self._unsent.pop(name).detach())
        return self.collectives.broadcast(full)
