"""Roles as a strategy has them: a model that learns, what a step made of it, and what it holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from lightrft.config import Config


@dataclass(frozen=True)
class TrainedRole:
    """A model that learns, with what makes it learn."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler


@dataclass(frozen=True)
class StepResult:
    """Outcome of one optimizer step, equal on all ranks."""

    grad_norm: float
    """Global norm before clipping; not finite where the step was skipped for it."""
    skipped: bool


@dataclass(frozen=True)
class RoleTensors:
    """Plain tensors of one rank; several may share a storage."""

    weights: list[Tensor]
    gradients: list[Tensor]
    optimizer: list[Tensor]


def stored_dtype(config: Config, trainable: bool) -> torch.dtype:
    """The dtype in which the weights of a role, or of the engine, are held."""
    return torch.bfloat16 if config.model.bf16 and not trainable else torch.float32


def model_of(name: str, roles: Sequence[TrainedRole]) -> nn.Module | None:
    return next((role.model for role in roles if role.name == name), None)


def hf_model_of(role: nn.Module) -> PreTrainedModel:
    """The transformers model inside a role."""
    model = role.get_submodule("model")
    assert isinstance(model, PreTrainedModel)
    return model


def decoder_layers(hf_model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that transformers says must stay whole, of towers as well; of one inside another, the outer one."""
    names = set(hf_model._no_split_modules or ())
    blocks = [module for module in hf_model.modules() if type(module).__name__ in names]
    inner = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in inner]
