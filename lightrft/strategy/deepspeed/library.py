"""Library: what is called of DeepSpeed, which is imported here alone, when it is first needed."""

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.optim import Optimizer


def start(device: torch.device, timeout: timedelta) -> None:
    """Makes DeepSpeed take up the process group that is there, without its chatter and without compiling anything."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # torch 2.13 renames collectives that DeepSpeed calls by their old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    if device.type == "cpu":
        # Otherwise it compiles an all-reduce of its own, for minutes, that only its inference uses.
        deepspeed.ops.__dict__["__compatible_ops__"] = {"deepspeed_shm_comm": False}
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)


def end() -> None:
    """Ends the process group, and the copies of it that DeepSpeed has made."""
    import deepspeed

    deepspeed.comm.destroy_process_group()


def initialize(role: nn.Module, settings: dict[str, Any], optimizer: Optimizer | None, timeout: timedelta) -> Any:
    """The engine of a role, a DeepSpeedEngine; without an optimizer it only computes. Every rank must call it."""
    import deepspeed

    # One of its optimizers prints its memory, on every rank.
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(model=role, optimizer=optimizer, config=settings)
    # Its copy of the group of all ranks has torch's own timeout.
    group: Any = engine.data_parallel_group
    _set_pg_timeout(timeout, group)
    return engine


def keep_whole(role: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Makes ZeRO-3 handle the weights of all modules of a layer together; before `initialize`.

    The role's forward raises NotImplementedError where one that learns runs more than once.
    """
    from deepspeed.utils import set_z3_leaf_module

    learning = {layer for layer in layers if any(parameter.requires_grad for parameter in layer.parameters())}
    seen: set[nn.Module] = set()

    def enter(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        # What is recomputed runs again, inside a backward pass.
        if layer in learning and torch._C._current_graph_task_id() == -1:
            if layer in seen:
                raise NotImplementedError(
                    f"ZeRO-3 reduces a layer's gradients once a pass, and this model runs one of its layers, a "
                    f"{type(layer).__name__}, more than once. Set --fsdp or --zero_stage 2."
                )
            seen.add(layer)
        return _first_by_position(layer, args, kwargs)

    role.register_forward_pre_hook(lambda *_: seen.clear())
    for layer in layers:
        set_z3_leaf_module(layer, True)
        layer.register_forward_pre_hook(enter, with_kwargs=True)


def _first_by_position(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Inputs as DeepSpeed needs them: of one that is given by name it would not wait for the gradient."""
    if args:
        return None
    first = next(iter(inspect.signature(layer.forward).parameters))
    return (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}


def destroy(engine: Any) -> None:
    """Ends a role's engine, whose buffers, hooks and places in lists would keep the model alive."""
    from deepspeed.runtime.zero import parameter_offload

    modules = set(engine.module.modules())
    engine.destroy()
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module not in modules]


def engine_of(model: nn.Module) -> Any:
    """The DeepSpeedEngine that `model` is."""
    from deepspeed import DeepSpeedEngine

    assert isinstance(model, DeepSpeedEngine)
    return model


def cut_up(parameter: nn.Parameter, on_host: bool, pinned: bool) -> None:
    """Leaves this rank its part of a weight, as ZeRO-3 wants it. Every rank must call it."""
    import deepspeed

    deepspeed.zero.Init(
        module=nn.ParameterList([parameter]),
        dtype=parameter.dtype,
        # It would put a function of its own in the place of torch.nn.functional.linear.
        mem_efficient_linear=False,
        remote_device="cpu" if on_host else None,
        pin_memory=on_host and pinned,
    )


def is_cut_up(tensor: Tensor) -> bool:
    """Whether ZeRO-3 deals the weight out: it then has `ds_tensor`, this rank's part, and the `ds_shape` of all."""
    from deepspeed.runtime.zero.partition_parameters import is_zero_param

    return is_zero_param(tensor)


def gathered(tensors: Sequence[Tensor], source: int | None = None) -> AbstractContextManager[None]:
    """Weights that are cut up are whole inside the context; others always are. Every rank must enter it.

    Args:
        tensors: Weights themselves, not views of them.
        source: Rank whose changes count; None where nothing changes.
    """
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(tensors), modifier_rank=source)


def offload_states() -> Any:
    """Names of what an engine can offload, as an enumeration."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    return OffloadStateTypeEnum
