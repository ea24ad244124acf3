"""Optimization: every backend's optimizer, and the schedule of its learning rate."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from lightrft.config import OptimizerConfig

FullShape: TypeAlias = Callable[[Tensor], tuple[int, ...]]
"""Gives the shape of the weight of which a parameter is a shard."""


def make_optimizer(model: nn.Module, options: OptimizerConfig, learning_rate: float, full_shape: FullShape) -> AdamW:
    return AdamW(
        parameter_groups(model, options.l2, full_shape),
        lr=learning_rate,
        betas=options.adam_betas,
        eps=options.adam_eps,
    )


def parameter_groups(model: nn.Module, weight_decay: float, full_shape: FullShape) -> list[dict[str, Any]]:
    """Trainable parameters for an optimizer: matrices decay, biases and norm weights do not; none is empty."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if len(full_shape(p)) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if len(full_shape(p)) < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_scheduler(optimizer: Optimizer, options: OptimizerConfig, num_steps: int) -> LRScheduler:
    """A warm-up, and then what `lr_scheduler` says, over `num_steps` optimizer steps."""
    warmup = warmup_steps(options, num_steps)
    if options.lr_scheduler == "cosine":
        return get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, num_steps, min_lr_rate=options.min_lr_ratio
        )
    name = {"constant": "constant_with_warmup", "linear": "linear"}[options.lr_scheduler]
    return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=num_steps)


def warmup_steps(options: OptimizerConfig, num_steps: int) -> int:
    """Optimizer steps of `num_steps` over which the learning rate rises."""
    if options.lr_warmup_steps is not None:
        return options.lr_warmup_steps
    return round(options.lr_warmup_ratio * num_steps)


def set_scheduler_steps(scheduler: LRScheduler, num_steps: int) -> None:
    """Makes a schedule, of the present flags, stand behind `num_steps` steps; the optimizer's rates follow."""
    if num_steps == 0:
        return
    # PyTorch warns of a first step before the optimizer's own, and this optimizer may not have stepped yet.
    scheduler.load_state_dict(scheduler.state_dict() | {"last_epoch": num_steps - 1, "_step_count": num_steps + 1})
    scheduler.step()
