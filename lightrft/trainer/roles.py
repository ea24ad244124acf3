"""Roles of a run: which models it has, and how long those that learn do so."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from lightrft.config import Config
from lightrft.models.actor import Actor
from lightrft.models.critic import Critic
from lightrft.models.loading import LoadedConfig, empty_model
from lightrft.models.lora import AdapterReference
from lightrft.strategy.roles import TrainedRole
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.sharded_state import role_weights


@dataclass(frozen=True)
class Roles:
    """The models of a run; None = not in the run."""

    actor: nn.Module
    initial_model: nn.Module | None
    critic: nn.Module | None
    teacher: nn.Module | None = None


def trained_roles(
    config: Config, strategy: StrategyBase, actor: LoadedConfig, critic: LoadedConfig, num_steps: int
) -> tuple[TrainedRole, TrainedRole | None]:
    """The actor, and the critic where the estimator needs one, with optimizers as long as the run."""
    updates = optimizer_steps(config, num_steps)
    frozen = optimizer_steps(config, min(config.algorithm.freezing_actor_steps, num_steps))
    rates = config.optimizer
    model = strategy.prepare_model(actor, "causal_lm", actor_builder(config, actor), trainable=True)
    actor_role = strategy.prepare_optimizer("actor", model, rates.actor_learning_rate, updates - frozen)
    if not config.algorithm.trains_critic:
        return actor_role, None
    model = strategy.prepare_model(critic, "trunk", Critic, trainable=True)
    critic_role = strategy.prepare_optimizer("critic", model, rates.critic_learning_rate, updates)
    if config.strategy.offload_critic:
        strategy.offload_model(critic_role.model)
    return actor_role, critic_role


def reference_model(config: Config, strategy: StrategyBase, loaded: LoadedConfig, actor: nn.Module) -> nn.Module | None:
    """What the KL divergence is taken from; an actor that trains an adapter has it inside."""
    if config.algorithm.init_kl_coef == 0:
        return None
    if loaded.adapter is not None:
        return AdapterReference(actor)
    return frozen_role(config, strategy, loaded)


def frozen_role(config: Config, strategy: StrategyBase, loaded: LoadedConfig) -> nn.Module:
    """A policy that only scores."""
    return strategy.prepare_model(loaded, "causal_lm", actor_builder(config, loaded), trainable=False)


def optimizer_steps(config: Config, num_steps: int) -> int:
    """Optimizer steps of a role that learns in so many steps."""
    return num_steps * config.train.max_epochs * updates_per_epoch(config)


def updates_per_epoch(config: Config) -> int:
    """Optimizer steps in one pass over a step's samples; a smaller last batch counts."""
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    return -(-samples // config.train.train_batch_size)


def actor_builder(config: Config, loaded: LoadedConfig) -> Callable[[PreTrainedModel], Actor]:
    entropy_grad = config.algorithm.entropy_coef != 0
    return lambda model: Actor(model, config.model.chunk_size, entropy_grad, loaded.suppressed_ids)


def role_shapes(config: Config, actor: LoadedConfig, critic: LoadedConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each weight of the trained roles by its name in a checkpoint."""
    with torch.device("meta"):
        hf_model = empty_model(actor, "causal_lm", torch.float32)
        models: dict[str, nn.Module] = {"actor": actor_builder(config, actor)(hf_model)}
        if config.algorithm.trains_critic:
            models["critic"] = Critic(empty_model(critic, "trunk", torch.float32))
    weights = [role_weights(name, model) for name, model in models.items()]
    return {name: tuple(tensor.shape) for part in weights for name, tensor in part.items()}
