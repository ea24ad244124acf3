import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightrft.config.arguments import Config, DataConfig, ModelConfig, RolloutConfig
from lightrft.strategy.engine import TRANSITIONS, EngineState, ManagedEngine, Operation, create_engine, preserved_rng
from lightrft.types import GenerationOutput, PromptExample, SamplingParams, Seeds, WeightBucket, WeightSpec
from tests.strategy.engine_conformance import GREEDY, prompts
from tests.tiny_models import save_model, tokenizer

AWAKE, WEIGHTS, KV_ASLEEP, DROPPED = EngineState
SPECS = [WeightSpec("w", (1,), torch.float32)]


class EventEngine:
    """Notes what is asked of it, and refuses what a real engine could not do with the memory that it holds."""

    staging_bytes = 0

    def __init__(self, sleep_level: int | None = None) -> None:
        self.events: list[str] = []
        self.held = {"weights", "kv_cache"}
        self.keeps_weights = sleep_level == 1
        self.has_values = False

    def generate(
        self, prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds
    ) -> list[list[GenerationOutput]]:
        assert self.held == {"weights", "kv_cache"} and self.has_values
        self.events.append("generate")
        return []

    def check_weights(self, specs: Sequence[WeightSpec]) -> None:
        self.events.append("check")
        if [spec.name for spec in specs] != ["w"]:
            raise ValueError("no such weight")

    def update_weights(self, bucket: WeightBucket) -> None:
        assert "weights" in self.held
        self.events.append("update")

    def verify_weights(self, bucket: WeightBucket) -> list[str]:
        self.events.append("verify")
        return []

    def finish_weight_update(self, version: int) -> None:
        self.events.append(f"finish {version}")
        self.has_values = True

    def sleep(self) -> None:
        assert self.held, "it sleeps already"
        self.events.append("sleep")
        self.held = set()
        self.has_values &= self.keeps_weights

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        assert tags is not None and not self.held & set(tags), "that is awake already"
        self.events += [f"wake {tag}" for tag in tags]
        self.held |= set(tags)

    def device_bytes(self) -> dict[str, int]:
        return {"weights": 4 * ("weights" in self.held), "kv_cache": 8 * ("kv_cache" in self.held)}


def sync(engine: ManagedEngine, version: int = 1) -> None:
    engine.begin_weight_update(SPECS)
    engine.update_weights([("w", torch.zeros(1))])
    engine.finish_weight_update(version)


def managed(sleep_level: int | None) -> tuple[ManagedEngine, EventEngine]:
    fake = EventEngine(sleep_level)
    return ManagedEngine(fake, sleep_level), fake


def engine_in(state: EngineState, sleep_level: int | None) -> tuple[ManagedEngine, EventEngine]:
    """A synced engine that came into `state` by its operations alone."""
    engine, fake = managed(sleep_level)
    engine.register_sync(lambda: sync(engine))
    sync(engine)
    if state is not WEIGHTS:
        engine.wake_up()
    if state in (KV_ASLEEP, DROPPED):
        engine.sleep()
    assert engine.state is state
    fake.events.clear()
    return engine, fake


def perform(engine: ManagedEngine, operation: Operation) -> None:
    match operation:
        case "sleep_1" | "sleep_2":
            engine.sleep()
        case "sync" | "sync_resident":
            sync(engine)
        case "generate":
            engine.generate([], GREEDY, [])
        case "wake_weights":
            engine.wake_up(["weights"])
        case "wake_up":
            engine.wake_up()


def level_of(state: EngineState, operation: Operation) -> int | None:
    """A sleep level under which the state can be reached and the operation exists."""
    if operation == "sync_resident":
        return None
    return 1 if operation == "sleep_1" or state is KV_ASLEEP else 2


REACHABLE = [
    (state, operation, new)
    for (state, operation), new in TRANSITIONS.items()
    # Only level 1 leads to KV_ASLEEP, and only level 2 to DROPPED.
    if (state, operation) not in [(KV_ASLEEP, "sleep_2"), (DROPPED, "sleep_1")]
]


@pytest.mark.parametrize(("state", "operation", "new"), REACHABLE, ids=lambda value: getattr(value, "name", value))
def test_each_operation_leads_where_the_table_says(state: EngineState, operation: Operation, new: EngineState) -> None:
    """WGT-03. The fake refuses to generate without memory, and to wake or sleep twice."""
    engine, fake = engine_in(state, level_of(state, operation))
    perform(engine, operation)
    assert engine.state is new
    expected = {AWAKE: {"weights", "kv_cache"}, WEIGHTS: {"weights"}, KV_ASLEEP: set(), DROPPED: set()}[new]
    assert fake.held == expected


def test_the_table_is_the_design_s() -> None:
    operations = ("sleep_1", "sleep_2", "sync", "generate", "wake_up")
    rows = {state: [TRANSITIONS[state, operation] for operation in operations] for state in EngineState}
    assert rows == {
        AWAKE: [KV_ASLEEP, DROPPED, WEIGHTS, AWAKE, AWAKE],
        WEIGHTS: [KV_ASLEEP, WEIGHTS, WEIGHTS, AWAKE, AWAKE],
        KV_ASLEEP: [KV_ASLEEP, KV_ASLEEP, WEIGHTS, AWAKE, AWAKE],
        DROPPED: [DROPPED, DROPPED, WEIGHTS, AWAKE, AWAKE],
    }


def test_one_cycle_wakes_the_weights_before_the_sync_and_the_kv_cache_after_it() -> None:
    """MEM-01."""
    engine, fake = engine_in(AWAKE, 2)
    engine.sleep()
    sync(engine, version=2)
    engine.generate([], GREEDY, [])
    assert fake.events == ["sleep", "wake weights", "check", "update", "finish 2", "wake kv_cache", "generate"]


def test_start_up_leaves_the_current_weights_awake_without_a_kv_cache() -> None:
    engine, fake = managed(2)
    sync(engine)
    engine.sleep()
    assert engine.state is WEIGHTS
    assert fake.events == ["sleep", "wake weights", "check", "update", "finish 1"]


def test_with_sleep_off_nothing_sleeps_or_wakes() -> None:
    engine, fake = engine_in(AWAKE, None)
    engine.sleep()
    sync(engine)
    engine.wake_up()
    engine.generate([], GREEDY, [])
    assert fake.events == ["check", "update", "finish 1", "generate"]


def test_level_1_keeps_weights_that_generate_without_a_sync() -> None:
    engine, fake = engine_in(AWAKE, 1)
    engine.sleep()
    engine.generate([], GREEDY, [])
    assert fake.events == ["sleep", "wake weights", "wake kv_cache", "generate"]


@pytest.mark.parametrize("sleep_level", [None, 1, 2])
def test_an_engine_that_was_never_synced_raises_or_syncs(sleep_level: int | None) -> None:
    """WGT-03."""
    engine, fake = managed(sleep_level)
    for operation in (lambda: engine.generate([], GREEDY, []), engine.wake_up):
        with pytest.raises(RuntimeError, match=r"no valid weights.*last version None.*update_engine_weights"):
            operation()
    assert fake.events == []
    engine.register_sync(lambda: sync(engine))
    engine.generate([], GREEDY, [])
    assert fake.events[-1] == "generate" and engine.weight_version == 1


def test_dropped_weights_raise_or_sync_from_the_registered_actor() -> None:
    """WGT-03."""
    engine, fake = managed(2)
    sync(engine)
    engine.generate([], GREEDY, [])
    engine.sleep()
    with pytest.raises(RuntimeError, match="state dropped"):
        engine.generate([], GREEDY, [])
    fake.events.clear()
    engine.register_sync(lambda: sync(engine, version=5))
    engine.generate([], GREEDY, [])
    assert fake.events == ["wake weights", "check", "update", "finish 5", "wake kv_cache", "generate"]


@pytest.mark.parametrize("sleep_level", [None, 1, 2])
def test_half_updated_weights_are_not_generated_from(sleep_level: int | None) -> None:
    """WGT-03: the same holds after a check that failed."""
    engine, _ = managed(sleep_level)
    sync(engine)
    engine.begin_weight_update(SPECS)
    engine.update_weights([("w", torch.zeros(1))])
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.generate([], GREEDY, [])
    engine.finish_weight_update(2)
    engine.generate([], GREEDY, [])
    with pytest.raises(ValueError, match="no such weight"):
        engine.begin_weight_update([WeightSpec("v", (1,), torch.float32)])
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.generate([], GREEDY, [])


def test_prompts_and_seeds_of_different_number_are_refused() -> None:
    engine, _ = engine_in(AWAKE, None)
    with pytest.raises(ValueError, match="2 prompts, 1 lists of seeds"):
        engine.generate(prompts(1, 1), GREEDY, [[0]])


def test_an_unknown_sleep_level_is_refused() -> None:
    with pytest.raises(ValueError, match="3"):
        ManagedEngine(EventEngine(), 3)


# Creation


def config(folder: str, **rollout: object) -> Config:
    return Config(ModelConfig(pretrain=folder), DataConfig(prompt_data=""), RolloutConfig(**rollout))  # type: ignore[arg-type]


@pytest.mark.parametrize(("enabled", "level"), [(True, 2), (False, None)])
def test_create_engine_builds_the_torch_engine_without_weights(
    tmp_path: Path, enabled: bool, level: int | None
) -> None:
    built = config(save_model(tmp_path), enable_engine_sleep=enabled)
    engine = create_engine(built, tokenizer(), torch.device("cpu"), None, None)
    assert (engine.sleep_level, engine.weight_version, engine.state) == (level, None, AWAKE)
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.generate(prompts(3), GREEDY, [[0]])


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    unknown = config("folder")
    unknown = replace(unknown, rollout=replace(unknown.rollout, engine_type="vlm"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of sglang, torch, vllm: 'vlm'"):
        create_engine(unknown, tokenizer(), torch.device("cpu"), None, None)


def random_numbers() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(1).item()]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_random_states_survive_a_body_that_seeds_and_fails() -> None:
    seed_all(3)
    expected = random_numbers()
    seed_all(3)
    with pytest.raises(KeyError), preserved_rng(torch.device("cpu")):
        seed_all(99)
        random_numbers()
        raise KeyError
    assert random_numbers() == expected


def test_creating_an_engine_leaves_our_random_states(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    seed_all(3)
    expected = random_numbers()
    seed_all(3)
    create_engine(config(folder), tokenizer(), torch.device("cpu"), None, None)
    assert random_numbers() == expected
