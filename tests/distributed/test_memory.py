"""What leaves the device when, that nothing is lost by it, and that the ledger tells it."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightrft.config import Config
from lightrft.models.actor import Actor
from lightrft.models.loading import load_config
from lightrft.strategy.engine import ManagedEngine, RolloutEngine
from lightrft.strategy.fsdp.fsdpv2 import FSDPV2Strategy
from lightrft.strategy.roles import TrainedRole
from lightrft.strategy.utils.host_buffers import HostBuffers
from lightrft.trainer import SPMDPPOTrainer
from lightrft.trainer.ppo_trainer import PPOTrainer
from lightrft.trainer.setup import check_inputs
from lightrft.utils.means import Means
from tests.distributed.runs import fsdp, ledger_peaks, make_config, read

PPO = {"advantage_estimator": "gae", "init_kl_coef": 0.05}
EVERY_MOVE = {"adam_offload": True, "offload_actor": True, "offload_critic": True}


class RecordingEngine:
    """An engine that notes what makes it take or give memory."""

    def __init__(self, engine: RolloutEngine, events: list[str]) -> None:
        self._engine = engine
        self._events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *args: Any) -> Any:
        self._events.append("generate")
        return self._engine.generate(*args)

    def finish_weight_update(self, version: int) -> None:
        self._events.append("synced")
        self._engine.finish_weight_update(version)

    def sleep(self) -> None:
        self._events.append("engine sleeps")
        self._engine.sleep()

    def wake_up(self, tags: Any = None) -> None:
        self._events.append(f"engine wakes {tags[0]}")
        self._engine.wake_up(tags)


class RecordingStrategy(FSDPV2Strategy):
    """Notes every move by the role's name, and refuses to move one that has gradients."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.events: list[str] = []
        self.names: dict[nn.Module, str] = {}

    def create_engine(self, tokenizer: Any) -> ManagedEngine:
        managed = super().create_engine(tokenizer)
        managed.engine = cast(RolloutEngine, RecordingEngine(managed.engine, self.events))
        return managed

    def _note(self, model: nn.Module, what: str) -> None:
        assert all(parameter.grad is None for parameter in model.parameters())
        self.events.append(f"{self.names.get(model, 'role')} {what}")

    def offload_model(self, model: nn.Module) -> None:
        self._note(model, "leaves")
        super().offload_model(model)

    def reload_model(self, model: nn.Module) -> None:
        self._note(model, "comes")
        super().reload_model(model)

    def offload_optimizer(self, role: TrainedRole) -> None:
        self._note(role.model, "optimizer leaves")
        super().offload_optimizer(role)

    def load_optimizer(self, role: TrainedRole) -> None:
        self._note(role.model, "optimizer comes")
        super().load_optimizer(role)


def trainer_of(config: Config, strategy: FSDPV2Strategy) -> SPMDPPOTrainer:
    return SPMDPPOTrainer(config, inputs=replace(check_inputs(config), strategy=strategy))


def recorded_steps(config: Config) -> list[str]:
    strategy = RecordingStrategy(config)
    trainer = trainer_of(config, strategy)
    roles = trainer.experience_maker.roles
    assert roles.initial_model is not None and roles.critic is not None
    strategy.names = {roles.actor: "actor", roles.initial_model: "reference", roles.critic: "critic"}
    trainer.fit()
    return strategy.events


CYCLE = [
    "actor leaves",
    "engine wakes kv_cache",
    "generate",
    "engine sleeps",
    "actor comes",
    "reference comes",
    "reference leaves",
    "critic comes",
    "critic leaves",
    "critic comes",
    "actor optimizer comes",
    "critic optimizer comes",
    "actor optimizer leaves",
    "critic optimizer leaves",
    "critic leaves",
    "engine wakes weights",
    "synced",
]


def test_a_cycle_frees_the_trainer_then_wakes_weights_then_syncs_then_wakes_the_cache(two_ranks, task, tmp_path):
    """MEM-01; no role has gradients when it or its optimizer moves."""
    config = make_config(task, tmp_path, algorithm=PPO, strategy=EVERY_MOVE)
    for events in two_ranks.run(recorded_steps, config):
        assert events[-2 * len(CYCLE) :] == CYCLE * 2


def test_without_flags_only_the_reference_moves(two_ranks, task, tmp_path):
    config = make_config(task, tmp_path, algorithm=PPO)
    for events in two_ranks.run(recorded_steps, config):
        moves = [event for event in events if event.endswith(("leaves", "comes")) and not event.startswith("role")]
        assert moves == ["reference comes", "reference leaves"] * 2


def failing_phases() -> list[str]:
    flags = EVERY_MOVE | {"fsdp": True, "dist_timeout_seconds": 60.0}
    with fsdp(strategy=flags) as plain:
        strategy = RecordingStrategy(plain.config)
        strategy.setup_distributed()
        model = nn.Linear(2, 2)
        strategy.names = {model: "it"}
        role = strategy.prepare_optimizer("critic", model, 1e-3, 10)
        contexts = {
            "on_device": lambda: strategy.on_device(model),
            "critic": lambda: strategy.critic_on_device(model),
            "actor": lambda: strategy.actor_off_device(model),
            "optimizer": lambda: strategy.optimizer_on_device(role, None),
        }
        for make in contexts.values():
            with pytest.raises(RuntimeError, match="in the phase"), make():
                raise RuntimeError("in the phase")
        strategy.close()
        return strategy.events


def test_an_exception_in_a_phase_leaves_everything_where_it_was_before(two_ranks):
    for events in two_ranks.run(failing_phases):
        assert events == [
            *("it comes", "it leaves"),
            *("it comes", "it leaves"),
            *("it leaves", "it comes"),
            *("it optimizer comes", "it optimizer leaves"),
        ]


class TwoMemories(HostBuffers):
    """Plays a device and a host on the CPU: what is left behind holds NaN, so whoever still looks there is found out.

    Tensors are told apart by their addresses.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.moves = 0

    def to_host(self, key: Any, tensor: Tensor) -> Tensor:
        if key is None or self._is_buffer(tensor):
            return tensor
        if key not in self._buffers:
            self._buffers[key] = torch.empty_like(tensor, requires_grad=False)
        buffer = self._buffers[key].copy_(tensor.detach())
        _local(tensor).fill_(torch.nan)
        self.moves += 1
        return buffer

    def to_device(self, tensor: Tensor) -> Tensor:
        if not self._is_buffer(tensor):
            return tensor
        copy = tensor.detach().clone()
        _local(tensor).fill_(torch.nan)
        self.moves += 1
        return copy

    def _is_buffer(self, tensor: Tensor) -> bool:
        return _local(tensor).data_ptr() in {_local(buffer).data_ptr() for buffer in self._buffers.values()}


@torch.no_grad()
def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data


class PoisoningStrategy(FSDPV2Strategy):
    def setup_distributed(self) -> None:
        super().setup_distributed()
        self.host_buffers = TwoMemories()


def final_weights(config: Config, moves: bool) -> tuple[dict[str, list[float]], int, int]:
    """Weights of actor and critic after the run, moves that were made, and host buffers that they took."""
    strategy = PoisoningStrategy(config) if moves else FSDPV2Strategy(config)
    trainer = trainer_of(config, strategy)
    trainer.train()
    assert trainer.critic is not None
    weights: dict[str, list[float]] = {}
    for role in (trainer.actor, trainer.critic):
        with strategy.on_device(role.model):
            named = strategy.named_weights(role.model, torch.float32)
            weights |= {f"{role.name} {name}": tensor.flatten().tolist() for name, tensor in named}
    trainer.writer.close()
    strategy.close()
    buffers = strategy.host_buffers
    return weights, buffers.moves if isinstance(buffers, TwoMemories) else 0, len(buffers._buffers)


def test_training_with_every_move_equals_training_without_to_the_bit(two_ranks, task, tmp_path):
    """MEM-03: FSDP2's own references to its shards move as well, and a moment is never left behind."""
    config = make_config(task, tmp_path / "stays", algorithm=PPO)
    moving = make_config(task, tmp_path / "moves", algorithm=PPO, strategy=EVERY_MOVE)
    stayed, moved = two_ranks.run(final_weights, config, False), two_ranks.run(final_weights, moving, True)
    for (expected, none, _), (got, moves, _) in zip(stayed, moved, strict=True):
        assert none == 0 and moves > 0
        assert got == expected
    # A buffer for each weight and moment, however often they move: actor 26 x 3, reference 26, critic 28 x 3. Rank 1
    # has nothing of the value head, and nothing has no address.
    assert moved[0][2] == 188


def losses(config: Config) -> list[tuple[float, float]]:
    SPMDPPOTrainer(config).fit()
    return [(line["train/policy_loss"], line["train/value_loss"]) for line in read(config, "metrics.jsonl")[1:]]


def test_a_critic_that_lives_on_the_host_learns_the_same(two_ranks, task, tmp_path):
    on_device = two_ranks.run(losses, make_config(task, tmp_path / "device", algorithm=PPO))[0]
    flags = {"critic_cpu_offload": True, "adam_offload": True}
    on_host = two_ranks.run(losses, make_config(task, tmp_path / "host", algorithm=PPO, strategy=flags))[0]
    assert on_host == [pytest.approx(pair, rel=1e-5) for pair in on_device]


class Watching(SPMDPPOTrainer):
    """Looks at the replay buffer before each update."""

    def ppo_train(self, step: int, means: Means) -> dict[str, float]:
        for sample in self.replay_buffer.experiences:
            for value in vars(sample).values():
                if isinstance(value, Tensor):
                    assert value.grad_fn is None and not value.requires_grad and value.device.type == "cpu"
        return super().ppo_train(step, means)


def watched_run(config: Config) -> int:
    return int(Watching(config).fit()["steps"])


def test_experience_is_on_the_cpu_and_has_no_graph(two_ranks, task, tmp_path):
    """MEM-07"""
    assert two_ranks.run(watched_run, make_config(task, tmp_path, algorithm=PPO)) == [2, 2]


# The ledger


def ledger_lines(config: Config) -> list[dict[str, float]]:
    trainer: PPOTrainer = SPMDPPOTrainer(config)
    trainer.fit()
    return read(config, "metrics.jsonl")


def test_the_ledger_of_a_run_counts_shards_gradients_moments_and_the_engine(two_ranks, task, tmp_path):
    """19,296 fp32 parameters on two ranks: 38,592 bytes a rank, as many of gradients, twice as many of moments."""
    config = make_config(task, tmp_path, algorithm=PPO, report={"print_memory_ledger": True})
    line = two_ranks.run(ledger_lines, config)[0][2]
    count = sum(p.numel() for p in load_actor(str(task / "model")).parameters())
    shard, whole = count * 4 // 2, count * 4
    buffers = 2 * 4 * 4  # The rotary frequencies twice, for heads of 8.
    train = ledger_peaks(line, "train")
    assert train["actor_weights"] == shard + buffers
    assert train["actor_gradients"] == shard
    assert train["actor_optimizer"] == 2 * shard
    assert train["critic_optimizer"] == 2 * train["critic_gradients"]
    assert "engine_weights" not in train and train["replay_buffer"] > 0
    generate = ledger_peaks(line, "generate")
    assert generate["engine_weights"] == whole
    # Half of 4 prompts x 4 samples, 8 + 6 tokens at most; keys and values of 2 layers, 2 heads of 8, fp32.
    assert 0 < generate["engine_kv_cache"] <= 8 * 14 * 2 * 2 * 2 * 8 * 4
    assert "actor_gradients" not in generate
    assert ledger_peaks(line, "sync")["engine_weights"] == whole
    for phase in ("generate", "actor", "reference", "critic", "reward", "train", "sync"):
        entry, peak, leaving = (line[f"memory/{phase}_{moment}_gib"] for moment in ("entry", "peak", "exit"))
        assert 0 < max(entry, leaving) <= peak
    assert line["memory/train_exit_gib"] < line["memory/train_peak_gib"]


def load_actor(folder: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return Actor(AutoModelForCausalLM.from_pretrained(folder, config=load_config(folder, "auto").hf_config))
