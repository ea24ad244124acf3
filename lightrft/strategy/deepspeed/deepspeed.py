"""DeepspeedStrategy: training with DeepSpeed's ZeRO."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW
from transformers import PreTrainedModel

from lightrft.config import Config
from lightrft.config.reward_models import reward_folders
from lightrft.models.loading import Kind, LoadedConfig
from lightrft.models.weights import persistent_tensors
from lightrft.strategy.deepspeed import library
from lightrft.strategy.deepspeed.fragments import flats_of
from lightrft.strategy.deepspeed.moves import Moves
from lightrft.strategy.deepspeed.settings import (
    frozen_settings,
    has_bf16_optimizer,
    trained_settings,
    whole_layers,
    zero_stage,
)
from lightrft.strategy.deepspeed.zero_state import ZeroState
from lightrft.strategy.roles import RoleTensors, TrainedRole, hf_model_of, stored_dtype
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.host_buffers import HostBuffers
from lightrft.strategy.utils.optimization import make_optimizer, make_scheduler
from lightrft.strategy.utils.role_loading import SentWeights, empty_role
from lightrft.strategy.utils.sharded_state import save_tensors


class DeepspeedStrategy(StrategyBase):
    """ZeRO stage 1, 2 or 3. The model of a trained role is its engine, whose forward prepares the backward pass."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.stage = zero_stage(config)
        self._engines: list[Any] = []
        self._moves: dict[nn.Module, Moves] = {}

    # Process groups

    def setup_distributed(self) -> None:
        super().setup_distributed()
        library.start(self.device, self.group_timeout)
        self.host_mesh: DeviceMesh = init_device_mesh("cpu", (self.world_size,), mesh_dim_names=("dp",))
        self.host_buffers = HostBuffers(self.device)

    def close(self) -> None:
        for engine in self._engines:
            library.destroy(engine)
        super().close()

    def _end_process_group(self) -> None:
        library.end()

    # Models

    def prepare_model(
        self,
        loaded: LoadedConfig,
        kind: Kind,
        build: Callable[[PreTrainedModel], nn.Module],
        trainable: bool,
    ) -> nn.Module:
        # A trained role computes with these weights, and its optimizer makes fp32 masters of them.
        dtype = stored_dtype(self.config, trainable=False)
        role = empty_role(self.config, loaded, kind, dtype, build, trainable)
        weights = SentWeights(loaded, kind, dtype, hf_model_of(role), self.collectives)
        self._load(role, weights, dtype, on_host=not trainable)
        if trainable:
            return role
        if self.stage == 3:
            return self._initialize(role, frozen_settings(self.config, role, self.device.type))
        self.offload_model(role)
        return role

    def _load(self, role: nn.Module, weights: SentWeights, dtype: torch.dtype, on_host: bool) -> None:
        """Gives the role its weights one by one; under ZeRO-3 each is cut up before the next one comes."""
        names = {tensor: name for name, tensor in persistent_tensors(hf_model_of(role))}

        def whole(target: Tensor, dtype: torch.dtype) -> Tensor:
            if target in names:
                return weights.whole(names[target], target.shape, dtype)
            # What the model is without a weight of its own, a value head, starts at 0.
            return torch.zeros(target.shape, dtype=dtype, device=self.device)

        # A tied weight is one parameter in two modules, and stays one.
        made: dict[Tensor, nn.Parameter] = {}
        for module in role.modules():
            for name, target in list(module.named_parameters(recurse=False)):
                if target not in made:
                    made[target] = nn.Parameter(whole(target, dtype), requires_grad=target.requires_grad)
                    if self.stage == 3:
                        library.cut_up(made[target], on_host, pinned=self.device.type == "cuda")
                setattr(module, name, made[target])
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, whole(buffer, buffer.dtype) if buffer in names else buffer.to(self.device))

    def _initialize(self, role: nn.Module, settings: dict[str, Any], optimizer: AdamW | None = None) -> nn.Module:
        if self.stage == 3:
            library.keep_whole(role, whole_layers(hf_model_of(role)))
        self._engines.append(library.initialize(role, settings, optimizer, self.group_timeout))
        return self._engines[-1]

    def prepare_optimizer(self, name: str, model: nn.Module, learning_rate: float, num_steps: int) -> TrainedRole:
        options = self.config.optimizer
        optimizer = make_optimizer(model, options, learning_rate, self.full_shape)
        engine = self._initialize(model, trained_settings(self.config, model, self.device.type), optimizer)
        self._moves[engine] = Moves(engine, optimizer, self.host_buffers)
        return TrainedRole(name, engine, optimizer, make_scheduler(optimizer, options, num_steps))

    # Optimisation

    def backward(self, loss: Tensor, role: TrainedRole, is_last: bool) -> None:
        engine = library.engine_of(role.model)
        # DeepSpeed looks at gradients alone. Times 1 changes no bit; times NaN, no gradient is finite either.
        loss = loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)
        engine.set_gradient_accumulation_boundary(is_last)
        with self.waiting(f"{role.name} backward"):
            engine.backward(loss, scale_wrt_gas=False)

    def apply_gradients(self, role: TrainedRole, loss_is_finite: bool) -> float:
        engine = library.engine_of(role.model)
        with self.waiting(f"{role.name} step"):
            engine.step()
        if engine.was_step_applied():
            role.scheduler.step()
        return float(engine.get_global_grad_norm())

    # Weights

    def full_tensors(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        # Behind the context a weight has other memory; a tensor that was made inside it holds on to the whole one's.
        with self.collectives.site("gathering weights"), library.gathered(tensors):
            return [tensor.detach().to(self.device, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]

    def full_shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.ds_shape if library.is_cut_up(tensor) else tensor.shape)

    # Checkpoints

    def save_roles(self, folder: Path, roles: Sequence[TrainedRole]) -> None:
        tensors: dict[str, Tensor] = {}
        for role in roles:
            tensors |= self._state_of(role).tensors()
        with self.collectives.site("writing a checkpoint"):
            save_tensors(folder, tensors)

    def load_roles(self, folder: Path, roles: Sequence[TrainedRole]) -> None:
        for role in roles:
            with self.collectives.site("reading a checkpoint"):
                self._state_of(role).load(folder)

    def _state_of(self, role: TrainedRole) -> ZeroState:
        return ZeroState(role.name, library.engine_of(role.model), role.optimizer, self.collectives, self.host_mesh)

    # Memory

    def offload_model(self, model: nn.Module) -> None:
        if model in self._moves:
            if self._moves_trained:
                self._moves[model].offload_weights()
        elif self.stage < 3:
            self.host_buffers.model_to_host(model)

    def reload_model(self, model: nn.Module) -> None:
        if model in self._moves:
            if self._moves_trained:
                self._moves[model].reload_weights()
        elif self.stage < 3:
            self.host_buffers.model_to_device(model)

    def offload_optimizer(self, role: TrainedRole) -> None:
        if self._moves_trained and not self.config.strategy.adam_offload:
            self._moves[role.model].offload_optimizer()

    def load_optimizer(self, role: TrainedRole) -> None:
        if self._moves_trained and not self.config.strategy.adam_offload:
            self._moves[role.model].reload_optimizer()

    @property
    def _moves_trained(self) -> bool:
        return self.device.type == "cuda" and not has_bf16_optimizer(self.config)

    def memory_notes(self) -> list[str]:
        strategy = self.config.strategy
        moves = {"offload_actor": strategy.offload_actor, "offload_critic": strategy.offload_critic}
        asked = [f"--{name}" for name, given in moves.items() if given]
        if self.device.type != "cuda":
            asked += ["--adam_offload"] if strategy.adam_offload else []
            return [f"this rank has no GPU, so nothing moves: {', '.join(asked)}"] if asked else []
        notes = []
        if asked and has_bf16_optimizer(self.config):
            notes.append(f"DeepSpeed cannot move what ZeRO-1 trains in bf16, so nothing moves: {', '.join(asked)}")
        if strategy.adam_offload:
            notes.append("DeepSpeed keeps fp32 weights and Adam's state on the host and steps there (--adam_offload)")
        if self.stage == 3 and (frozen := self._frozen_roles()):
            notes.append(f"ZeRO-3 keeps {' and '.join(frozen)} on the host, and brings a layer at a time to the device")
        return notes

    def _frozen_roles(self) -> list[str]:
        """Those with weights of their own: an adapter's reference is the actor."""
        model = self.config.model
        has_reference = self.config.algorithm.init_kl_coef > 0 and not model.trains_adapter
        is_there = {
            "the reference": has_reference,
            "the teacher": model.teacher_pretrain is not None,
            "the reward models": bool(reward_folders(self.config.reward.reward_pretrain)),
        }
        return [name for name, is_given in is_there.items() if is_given]

    @torch.no_grad()
    def model_tensors(self, model: nn.Module) -> list[Tensor]:
        return [self._own(tensor) for tensor in (*model.parameters(), *model.buffers())]

    @torch.no_grad()
    def role_tensors(self, role: TrainedRole) -> RoleTensors:
        engine = library.engine_of(role.model)
        flats = flats_of(engine, role.optimizer)
        moments = [value for state in role.optimizer.state.values() for value in state.values()]
        return RoleTensors(
            self.model_tensors(engine.module),
            [*self._gradients(engine), *(flat.grad for flat in flats if flat.grad is not None)],
            [*flats, *moments],
        )

    def _own(self, tensor: Any) -> Tensor:
        """What this rank has of a weight."""
        return tensor.ds_tensor if library.is_cut_up(tensor) else tensor

    def _gradients(self, engine: Any) -> list[Tensor]:
        """Averaged over ranks. ZeRO-3, and DeepSpeed's optimizer for bf16, keep memory for them all the time."""
        if self.stage == 3:
            return [engine.optimizer.grad_partitions_flat_buffer]
        if has_bf16_optimizer(self.config):
            return list(engine.optimizer.fp32_groups_gradients_flat)
        return [gradient for group in engine.optimizer.averaged_gradients.values() for gradient in group or ()]
