"""FSDPV2Strategy: training with PyTorch's fully_shard."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from lightrft.models.critic import ValueHead
from lightrft.models.loading import Kind, LoadedConfig, materialize
from lightrft.models.scalar_head import ScalarHead
from lightrft.models.weights import persistent_tensors
from lightrft.strategy.roles import RoleTensors, TrainedRole, decoder_layers, hf_model_of, stored_dtype
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.gathering import cast_tensors, gather_rows
from lightrft.strategy.utils.host_buffers import HostBuffers
from lightrft.strategy.utils.optimization import make_optimizer, make_scheduler
from lightrft.strategy.utils.role_loading import SentWeights, empty_role
from lightrft.strategy.utils.sharded_state import (
    load_optimizer_state,
    load_tensors,
    optimizer_state,
    role_weights,
    save_tensors,
)


class FSDPV2Strategy(StrategyBase):
    """Each decoder layer, and each block of what reads media, is one FSDP2 group; the role itself is the root group,
    with embedding, norm and LM head."""

    def setup_distributed(self) -> None:
        super().setup_distributed()
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("dp",))
        self.host_buffers = HostBuffers(self.device)

    # Models

    def prepare_model(
        self,
        loaded: LoadedConfig,
        kind: Kind,
        build: Callable[[PreTrainedModel], nn.Module],
        trainable: bool,
    ) -> nn.Module:
        dtype = stored_dtype(self.config, trainable and loaded.adapter is None)
        role = empty_role(self.config, loaded, kind, dtype, build, trainable)
        hf_model = hf_model_of(role)
        # A critic is the role that learns without an LM head.
        offloads = trainable and self._lives_on_host(kind == "trunk")
        self._shard(role, hf_model, offloads)
        materialize(role, torch.device("cpu") if offloads else self.device, self.device)
        weights = SentWeights(loaded, kind, dtype, hf_model, self.collectives)
        for name, target in persistent_tensors(hf_model):
            # Each rank keeps its shard.
            _copy_shard(weights.whole(name, target.shape, target.dtype), target.detach())
        for module in role.modules():
            if isinstance(module, ValueHead):
                module.reset_parameters()
        if not trainable:
            self.offload_model(role)
        return role

    def _lives_on_host(self, is_critic: bool) -> bool:
        """Whether a role that learns is on the host all the time."""
        strategy = self.config.strategy
        return strategy.fsdp_cpu_offload or (strategy.critic_cpu_offload and is_critic)

    def _shard(self, role: nn.Module, hf_model: PreTrainedModel, offloads: bool) -> None:
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = half if self.config.model.bf16 else MixedPrecisionPolicy()
        pin = self.device.type == "cuda"
        offload = CPUOffloadPolicy(pin_memory=pin) if offloads else OffloadPolicy()
        for layer in decoder_layers(hf_model):
            fully_shard(layer, mesh=self.mesh, mp_policy=policy, offload_policy=offload)
        for module in role.modules():
            if isinstance(module, ScalarHead):
                fully_shard(module, mesh=self.mesh, offload_policy=offload)
        # The root would keep its gathered weights after a forward without gradients, and train on with stale ones.
        fully_shard(role, mesh=self.mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=True)

    def prepare_optimizer(self, name: str, model: nn.Module, learning_rate: float, num_steps: int) -> TrainedRole:
        options = self.config.optimizer
        optimizer = make_optimizer(model, options, learning_rate, self.full_shape)
        return TrainedRole(name, model, optimizer, make_scheduler(optimizer, options, num_steps))

    # Optimisation

    def backward(self, loss: Tensor, role: TrainedRole, is_last: bool) -> None:
        # Gradients are reduced for every micro-batch: keeping them whole until the last one would cost a full model.
        with self.waiting(f"{role.name} backward"):
            loss.backward()

    def apply_gradients(self, role: TrainedRole, loss_is_finite: bool) -> float:
        norm = self.clip_grad_norm(role, loss_is_finite)
        if math.isfinite(norm):
            role.optimizer.step()
            role.scheduler.step()
        role.optimizer.zero_grad(set_to_none=True)
        return norm

    def clip_grad_norm(self, role: TrainedRole, loss_is_finite: bool) -> float:
        """Clips to the global norm and returns it, equal on all ranks; NaN if a loss was not finite anywhere."""
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

    def full_tensors(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        # With gradients, the local tensor of a DTensor would cost as much as the copy of a small weight.
        with torch.no_grad():
            whole = [_local(tensor) for tensor in tensors]
        is_sharded = [isinstance(tensor, DTensor) for tensor in tensors]
        sharded = [i for i, cut in enumerate(is_sharded) if cut]
        plain = [i for i, cut in enumerate(is_sharded) if not cut]
        gathered = gather_rows(
            [whole[i] for i in sharded],
            [tensors[i].shape for i in sharded],
            [dtypes[i] for i in sharded],
            self.device,
            self.collectives,
        )
        cast = cast_tensors([whole[i] for i in plain], [dtypes[i] for i in plain], self.device)
        for i, tensor in zip(sharded + plain, gathered + cast, strict=True):
            whole[i] = tensor
        return whole

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
        self.host_buffers.model_to_host(model)

    def reload_model(self, model: nn.Module) -> None:
        self.host_buffers.model_to_device(model)

    def offload_optimizer(self, role: TrainedRole) -> None:
        for parameter, state in role.optimizer.state.items():
            for name, value in _moments(state):
                state[name] = self.host_buffers.to_host((parameter, name), value)
        self.host_buffers.wait()

    def load_optimizer(self, role: TrainedRole) -> None:
        if self._lives_on_host(role.name == "critic"):
            return
        for state in role.optimizer.state.values():
            state |= {name: self.host_buffers.to_device(value) for name, value in _moments(state)}
        self.host_buffers.wait()

    def memory_notes(self) -> list[str]:
        strategy = self.config.strategy
        flags = {"adam_offload": strategy.adam_offload, "offload_actor": strategy.offload_actor}
        asked = [f"--{name}" for name, given in (flags | {"offload_critic": strategy.offload_critic}).items() if given]
        if not asked or self.device.type == "cuda":
            return []
        return [f"this rank has no GPU: the host holds everything already, and {', '.join(asked)} move nothing"]

    @torch.no_grad()
    def model_tensors(self, model: nn.Module) -> list[Tensor]:
        return [_local(tensor) for tensor in (*model.parameters(), *model.buffers())]

    @torch.no_grad()
    def role_tensors(self, role: TrainedRole) -> RoleTensors:
        gradients = [_local(p.grad) for p in role.model.parameters() if p.grad is not None]
        moments = [_local(value) for state in role.optimizer.state.values() for _, value in _moments(state)]
        return RoleTensors(self.model_tensors(role.model), gradients, moments)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copy_shard(full: Tensor, target: Tensor) -> None:
    if isinstance(target, DTensor):
        shard = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(shard.to_local())
    else:
        target.copy_(full)


def _moments(state: Mapping[str, object]) -> list[tuple[str, Tensor]]:
    """A parameter's entries that are as large as itself: the count of steps stays where the optimizer put it."""
    return [(name, value) for name, value in state.items() if isinstance(value, Tensor) and value.ndim > 0]
