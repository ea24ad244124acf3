"""FSDPV2Strategy: training with PyTorch's fully_shard."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel, get_scheduler
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from lightrft.models.critic import ValueHead
from lightrft.models.loading import Kind, LoadedConfig, empty_model, materialize, persistent_tensors, pretrained_weights
from lightrft.strategy.strategy_base import (
    StrategyBase,
    TrainedRole,
    hf_model_of,
    stored_dtype,
    warmup_steps,
)
from lightrft.strategy.utils.devices import moved
from lightrft.strategy.utils.sharded_state import (
    load_optimizer_state,
    load_tensors,
    optimizer_state,
    role_weights,
    save_tensors,
)
from lightrft.types import WeightSpec


class FSDPV2Strategy(StrategyBase):
    """Each decoder layer is one FSDP2 group; the role itself is the root group, with embedding, norm and LM head."""

    def setup_distributed(self) -> None:
        super().setup_distributed()
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("dp",))

    # Models

    def prepare_model(
        self,
        loaded: LoadedConfig,
        kind: Kind,
        build: Callable[[PreTrainedModel], nn.Module],
        trainable: bool,
    ) -> nn.Module:
        dtype = stored_dtype(self.config, trainable)
        hf_model = empty_model(loaded, kind, dtype)
        if trainable and self.config.model.gradient_checkpointing:
            hf_model.gradient_checkpointing_enable({"use_reentrant": False})
        with torch.device("meta"):
            role = build(hf_model)
        role.requires_grad_(trainable).train(trainable)
        offloads = trainable and self.config.strategy.fsdp_cpu_offload
        self._shard(role, hf_model, offloads)
        materialize(role, torch.device("cpu") if offloads else self.device, self.device)
        self._load(hf_model, loaded, kind, dtype)
        for module in role.modules():
            if isinstance(module, ValueHead):
                module.reset_parameters()
        if not trainable:
            self.offload_model(role)
        return role

    def _shard(self, role: nn.Module, hf_model: PreTrainedModel, offloads: bool) -> None:
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = half if self.config.model.bf16 else MixedPrecisionPolicy()
        pin = self.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pin) if offloads else OffloadPolicy()
        for layer in decoder_layers(hf_model):
            fully_shard(layer, mesh=self.mesh, mp_policy=policy, offload_policy=offload)
        for module in role.modules():
            if isinstance(module, ValueHead):
                fully_shard(module, mesh=self.mesh, offload_policy=offload)
        # The root would keep its gathered weights after a forward without gradients, and train on with stale ones.
        fully_shard(role, mesh=self.mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)

    def _load(self, hf_model: PreTrainedModel, loaded: LoadedConfig, kind: Kind, dtype: torch.dtype) -> None:
        """Rank 0 reads the weights and sends them one by one; each rank keeps its shard."""
        weights: dict[str, Tensor] = {}
        with self.collectives.collect(f"loading {loaded.pretrain}"):
            if self.is_rank_0:
                weights = pretrained_weights(loaded, kind, dtype)
                if absent := [name for name, _ in persistent_tensors(hf_model) if name not in weights]:
                    raise ValueError(f"{loaded.pretrain} lacks {', '.join(absent[:5])}")
        for name, target in persistent_tensors(hf_model):
            if self.is_rank_0:
                full = weights.pop(name).detach().to(self.device)
            else:
                full = torch.empty(target.shape, dtype=target.dtype, device=self.device)
            self.collectives.broadcast(full)
            _copy_shard(full, target.detach())

    def prepare_optimizer(self, name: str, model: nn.Module, learning_rate: float, num_steps: int) -> TrainedRole:
        options = self.config.optimizer
        decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
        others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
        optimizer = AdamW(
            [{"params": decayed, "weight_decay": options.l2}, {"params": others, "weight_decay": 0.0}],
            lr=learning_rate,
            betas=options.adam_betas,
            eps=options.adam_eps,
        )
        return TrainedRole(name, model, optimizer, self._scheduler(optimizer, num_steps))

    def _scheduler(self, optimizer: Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        options = self.config.optimizer
        warmup = warmup_steps(options, num_steps)
        if options.lr_scheduler == "cosine":
            return get_cosine_with_min_lr_schedule_with_warmup(
                optimizer, warmup, num_steps, min_lr_rate=options.min_lr_ratio
            )
        name = {"constant": "constant_with_warmup", "linear": "linear"}[options.lr_scheduler]
        return get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=num_steps)

    # Optimisation

    def backward(self, loss: Tensor, role: TrainedRole, is_last: bool) -> None:
        # Gradients are reduced for every micro-batch: keeping them whole until the last one would cost a full model.
        with self.waiting(f"{role.name} backward"):
            loss.backward()

    def clip_grad_norm(self, role: TrainedRole, loss_is_finite: bool) -> float:
        grads = [p.grad.to_local() for p in role.model.parameters() if isinstance(p.grad, DTensor)]
        local = float(get_total_norm(grads)) if grads else 0.0
        square = local**2 if loss_is_finite else float("nan")
        [total] = self.collectives.all_reduce_sum([square])
        norm = total**0.5
        max_norm = self.config.optimizer.max_norm
        if 0 < max_norm < norm < float("inf"):
            torch._foreach_mul_(grads, max_norm / norm)
        return norm

    # Weights

    def weight_specs(self, model: nn.Module, dtype: torch.dtype) -> list[WeightSpec]:
        return [WeightSpec(name, tuple(p.shape), _sent_dtype(p, dtype)) for name, p in _actor_tensors(model)]

    def named_weights(self, model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _actor_tensors(model):
            yield name, self._full(tensor.detach(), _sent_dtype(tensor, dtype))

    def _full(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.to(self.device, dtype)
        # The shard is cast before the gather: half the bytes travel.
        shard = tensor.to_local().to(self.device, dtype)
        whole = DTensor.from_local(
            shard, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        return self.collectives.full_tensor(whole)

    # Checkpoints

    def save_roles(self, folder: Path, roles: Sequence[TrainedRole]) -> None:
        tensors: dict[str, Tensor] = {}
        for role in roles:
            tensors |= role_weights(role.name, role.model)
            tensors |= optimizer_state(role.name, role.model, role.optimizer)
        with self.collectives.site("writing a checkpoint"):
            save_tensors(folder, tensors)

    def load_roles(self, folder: Path, roles: Sequence[TrainedRole]) -> None:
        on_host = self.config.strategy.adam_offload
        for role in roles:
            with self.collectives.site("reading a checkpoint"):
                load_tensors(folder, role_weights(role.name, role.model))
                load_optimizer_state(folder, role.name, role.model, role.optimizer, on_host)

    # Memory

    def offload_model(self, model: nn.Module) -> None:
        model.to("cpu")

    def reload_model(self, model: nn.Module) -> None:
        model.to(self.device)

    def on_device(self, model: nn.Module) -> AbstractContextManager[None]:
        return moved(lambda: self.reload_model(model), lambda: self.offload_model(model))

    def load_optimizer(self, optimizer: Optimizer) -> None:
        _move_state(optimizer, self.device)

    def offload_optimizer(self, optimizer: Optimizer) -> None:
        _move_state(optimizer, torch.device("cpu"))

    def optimizer_on_device(self, *roles: TrainedRole | None) -> AbstractContextManager[None]:
        if not self.config.strategy.adam_offload:
            return nullcontext()
        optimizers = [role.optimizer for role in roles if role is not None]

        def each(move: Callable[[Optimizer], None]) -> None:
            for optimizer in optimizers:
                move(optimizer)

        return moved(lambda: each(self.load_optimizer), lambda: each(self.offload_optimizer))


def decoder_layers(hf_model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that transformers says must stay whole."""
    names = set(hf_model._no_split_modules or ())
    return [module for module in hf_model.modules() if type(module).__name__ in names]


def _actor_tensors(actor: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return persistent_tensors(hf_model_of(actor))


def _sent_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def _copy_shard(full: Tensor, target: Tensor) -> None:
    if isinstance(target, DTensor):
        shard = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(shard.to_local())
    else:
        target.copy_(full)


def _move_state(optimizer: Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0:
                state[name] = value.to(device)
