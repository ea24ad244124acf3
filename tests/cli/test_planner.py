"""The planner's arithmetic, against hand-worked sums, real graphs and the ledger of a real run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightrft.cli.model_size import ModelSize
from lightrft.cli.planner import CONTEXT_BYTES, PhasePeak, plan_memory
from lightrft.cli.role_sizes import model_sizes
from lightrft.config import Config
from lightrft.models.loading import load_config
from lightrft.trainer import SPMDPPOTrainer
from tests import tiny_models
from tests.distributed.runs import config as base_config
from tests.distributed.runs import ledger_peaks, make_config, read, save_task

BILLION = 10**9
SIZE = ModelSize(
    total=BILLION,
    learned=BILLION,
    root=2 * 10**8,
    layer=4 * 10**7,
    largest=2 * 10**8,
    layers=20,
    hidden=1000,
    intermediate=4000,
    query=1000,
    key=500,
    heads=10,
    vocabulary=2 * 10**5,
)


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    save_task(folder)
    return folder


def config(lengths: tuple[int, int] = (100, 150), **owners: dict) -> Config:
    """bf16 on FSDP2; on two ranks one micro-batch of 4 responses."""
    changes = {
        "model": {"bf16": True},
        "data": {"prompt_max_len": lengths[0]},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "generate_max_len": lengths[1]},
        "train": {"train_batch_size": 8, "micro_train_batch_size": 4},
        "algorithm": {"init_kl_coef": 0.1},
    }
    names = {*changes, *owners}
    return base_config("unused", **{name: changes.get(name, {}) | owners.get(name, {}) for name in names})


def plan(config: Config, critic: ModelSize | None = None, world_size: int = 2) -> dict[str, PhasePeak]:
    return {peak.phase: peak for peak in plan_memory(config, SIZE, critic, world_size)}


def test_what_stays_on_a_rank_is_half_of_the_fp32_weights_and_moments():
    """1e9 parameters on two ranks: 4e9 / 2 of weights, 8e9 / 2 of moments; the engine has all in bf16."""
    peaks = plan(config(), critic=SIZE)
    for phase in ("generate", "actor", "reference", "critic", "train", "sync"):
        assert peaks[phase].owners["actor weights"] == peaks[phase].owners["critic weights"] == 2 * BILLION
        assert peaks[phase].owners["actor optimizer"] == 4 * BILLION
        assert peaks[phase].owners["other"] == CONTEXT_BYTES
    assert peaks["generate"].owners["engine weights"] == peaks["sync"].owners["engine weights"] == 2 * BILLION
    assert peaks["reference"].owners["initial_model weights"] == BILLION
    assert "initial_model weights" not in peaks["train"].owners
    # 8 responses on two ranks, 250 tokens, keys and values of 20 layers and 500 numbers of 2 bytes.
    assert peaks["generate"].owners["engine kv_cache"] == 4 * 250 * 2 * 20 * 500 * 2


def test_roles_that_are_not_in_the_run_have_no_phase():
    assert list(plan(config(algorithm={"init_kl_coef": 0.0}))) == ["generate", "actor", "train", "sync"]


def test_a_teacher_scores_after_the_reference_and_alone():
    """Twice the actor's size: 2e9 parameters in bf16 on two ranks are 2e9 bytes a rank."""
    teacher = replace(SIZE, total=2 * BILLION, learned=2 * BILLION)
    for init_kl_coef in (0.0, 0.1):
        one = config(algorithm={"init_kl_coef": init_kl_coef})
        [peak] = [peak for peak in plan_memory(one, SIZE, None, 2, teacher=teacher) if peak.phase == "reference"]
        assert peak.owners["teacher weights"] == 2 * BILLION
        assert "initial_model weights" not in peak.owners


def rewarding(size: ModelSize, **owners: dict) -> dict[str, PhasePeak]:
    """Of a run with three reward models of one size."""
    models = dict.fromkeys(("helpful", "safe", "brief"), replace(size, vocabulary=0))
    return {peak.phase: peak for peak in plan_memory(config(**owners), SIZE, None, 2, reward_models=models)}


def weights_of_rewards(peak: PhasePeak) -> dict[str, int]:
    return {owner: size for owner, size in peak.owners.items() if owner.startswith("reward ")}


def test_reward_models_are_on_the_device_all_at_once_or_one_at_a_time():
    """MEM-06: 1e9 parameters in bf16 on two ranks are 1e9 bytes each; the other phases have none."""
    peaks = rewarding(SIZE)
    names = ("helpful", "safe", "brief")
    assert weights_of_rewards(peaks["reward"]) == {f"reward {name} weights": BILLION for name in names}
    assert peaks["reward"].savings["--reward_residency one"] == 2 * BILLION
    assert not any(weights_of_rewards(peak) for phase, peak in peaks.items() if phase != "reward")
    one = rewarding(SIZE, reward={"reward_residency": "one"})["reward"]
    assert list(weights_of_rewards(one).values()) == [BILLION]
    assert one.total == peaks["reward"].total - 2 * BILLION
    assert "--reward_residency one" not in one.savings


def test_reward_models_meet_the_engine_only_in_dynamic_sampling():
    large = replace(SIZE, total=20 * BILLION)
    generate = rewarding(large, rollout={"dynamic_sampling": True})["generate"]
    assert generate.owners["engine weights"] == 2 * BILLION
    assert list(weights_of_rewards(generate).values()) == [20 * BILLION] * 3
    assert "engine kv_cache" not in generate.owners
    assert "reward safe weights" not in rewarding(large)["generate"].owners


def test_zero_3_brings_reward_models_a_layer_at_a_time():
    peak = rewarding(SIZE, strategy={"fsdp": False, "zero_stage": 3})["reward"]
    assert weights_of_rewards(peak) == {} and "--reward_residency one" not in peak.savings


@pytest.mark.parametrize(("adam_offload", "moves"), [(False, False), (True, True)])
def test_what_deepspeed_cannot_move_stays_in_the_plan(adam_offload, moves):
    """ZeRO-1 in bf16 has an optimizer that cannot leave, unless it is on the host: 2e9 bytes of weights each."""
    flags = {"fsdp": False, "zero_stage": 1, "adam_offload": adam_offload, "offload_actor": True}
    peaks = plan(config(strategy=flags | {"offload_critic": True}), critic=SIZE)
    assert ("actor weights" in peaks["generate"].owners) is not moves
    assert ("critic weights" in peaks["actor"].owners) is not moves
    without = plan(config(strategy=flags | {"offload_actor": False}), critic=SIZE)
    assert ("--offload_critic" in without["actor"].savings) is moves


def test_activations_are_those_of_the_layer_and_checkpointing_keeps_one_input_of_each():
    """A token: norms 2 x (4 + 2 + 2) x 1000, attention 2 x 2 x 1500 + 4 x 10, MLP 4 x 2 x 4000: 54,040 bytes."""
    assert SIZE.saved_per_token(2) == 16_000 + 6_040 + 32_000
    lengths = (10_000, 15_000)
    kept = plan(config(lengths))["train"].owners["activations"]
    recomputed = plan(config(lengths, model={"gradient_checkpointing": True}))["train"].owners["activations"]
    # 100,000 tokens in 20 layers, and the last norm and the 60,000 response tokens' states.
    last = 8 * 1000 * 100_000 + 2 * 1000 * 60_000
    assert kept == 20 * 100_000 * 54_040 + last + 100_000 * 30_000
    # 20 inputs of 2 x 1000 bytes; one layer made again, and its scratch of 3 x 2 x 5000 bytes a token.
    assert recomputed == 20 * 100_000 * 2000 + last + 100_000 * (54_040 + 30_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_layer_keeps_what_the_formula_says(dtype):
    """The difference between three layers and two; the CPU's attention keeps its output in two layouts."""

    def kept(layers: int) -> int:
        sizes = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": 256, "num_key_value_heads": 2}
        model = tiny_models.random_model(tiny_models.qwen2(**sizes)).train().to(dtype)
        return saved_bytes(model.base_model, lambda: model.base_model(torch.full((1, 48), 5), use_cache=False)[0])

    model = tiny_models.random_model(tiny_models.qwen2(hidden_size=64, intermediate_size=256))
    size = ModelSize.of(model, has_lm_head=True)
    per_token = (kept(3) - kept(2)) / 48
    again = dtype.itemsize * size.query
    assert size.saved_per_token(dtype.itemsize) <= per_token <= size.saved_per_token(dtype.itemsize) + again + 64


def saved_bytes(model: torch.nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes of the storages that a forward keeps for its backward pass, besides the weights."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)


def test_the_step_of_an_optimizer_takes_the_roots_of_all_second_moments():
    """Few tokens on one rank: the fullest moment is the step, with all gradients and 4e9 of roots."""
    owners = plan(config(train={"micro_train_batch_size": 1}), critic=SIZE, world_size=1)["train"].owners
    assert owners["optimizer step"] == owners["actor gradients"] == owners["critic gradients"] == 4 * BILLION


@pytest.mark.parametrize(
    ("flag", "phase", "saved"),
    [
        ("--adam_offload", "actor", 8 * BILLION),
        ("--offload_actor", "generate", 2 * BILLION),
        ("--offload_critic", "sync", 2 * BILLION),
        ("--critic_cpu_offload", "sync", 6 * BILLION),
    ],
)
def test_a_flag_is_named_with_what_it_takes_off_a_phase(flag, phase, saved):
    assert plan(config(), critic=SIZE)[phase].savings[flag] == saved


def test_a_flag_that_the_others_leave_nothing_to_is_not_offered():
    everything = plan(config(strategy={"fsdp_cpu_offload": True}), critic=SIZE)
    named = {flag for peak in everything.values() for flag in peak.savings}
    assert not named & {"--adam_offload", "--offload_actor", "--offload_critic", "--critic_cpu_offload"}
    assert "actor weights" not in everything["train"].owners


def test_each_stage_of_zero_deals_out_more():
    """1e9 parameters in bf16 on two ranks: stage 1 deals out 12e9 of masters and moments, 2 gradients, 3 weights."""
    owners = {stage: plan(config(strategy={"fsdp": False, "zero_stage": stage}))["train"].owners for stage in (1, 2, 3)}
    assert [owners[stage]["actor optimizer"] for stage in (1, 2, 3)] == [6 * BILLION] * 3
    assert [owners[stage]["actor gradients"] for stage in (1, 2, 3)] == [4 * BILLION, 2 * BILLION, 2 * BILLION]
    assert [owners[stage]["actor weights"] for stage in (1, 2, 3)] == [2 * BILLION, 2 * BILLION, BILLION]
    # Stage 3 has memory for gradients, and a bucket of 5e7 fp32 numbers, all the time.
    between = plan(config(strategy={"fsdp": False, "zero_stage": 3}))["sync"].owners
    assert (between["actor gradients"], between["reduction buckets"]) == (2 * BILLION, 4 * 50_000_000)
    offloaded = plan(config(strategy={"fsdp": False, "zero_stage": 2, "adam_offload": True}))["train"].owners
    assert "actor optimizer" not in offloaded


def test_a_small_device_bounds_the_cache():
    [generate, *_] = plan_memory(config(), SIZE, None, 2, device_bytes=10 * BILLION)
    free = 10 * BILLION - CONTEXT_BYTES - 8 * BILLION
    assert generate.owners["engine kv_cache"] <= max(0.5 * free, 4 * 250 * 40_000)


def test_vllm_takes_its_share_of_the_whole_device():
    """A share of 0.3 of 10 GB is 3 GB: bf16 weights of 2 bytes over a rollout group of two, and the cache."""
    rollout = {"engine_type": "vllm", "engine_tp_size": 2, "engine_mem_util": 0.3}
    [generate, *_] = plan_memory(config(rollout=rollout), SIZE, None, 2, device_bytes=10 * BILLION)
    weights = generate.owners["engine weights"]
    assert (weights, generate.owners["engine kv_cache"]) == (SIZE.total, 3 * BILLION - SIZE.total)


def test_sglang_keeps_its_weights_on_the_device_unless_it_drops_them():
    """Level 1 is its own; SIZE.total weights in bf16 are 2 bytes each."""
    held = [
        plan(config(rollout={"engine_type": engine, "engine_sleep_level": level}))["actor"].owners.get("engine weights")
        for engine, level in (("sglang", None), ("sglang", 1), ("sglang", 2), ("vllm", 1), ("vllm", None))
    ]
    assert held == [2 * SIZE.total, 2 * SIZE.total, None, None, None]


def test_sglang_s_staging_buffer_is_beside_a_sync_s_buckets():
    """A quarter of a bucket of 4 GB, or the largest weight, 2 bytes each, as SGLang's channel has it."""
    for bucket, staged in ((4 * BILLION, max(BILLION, 2 * SIZE.largest)), (4, 2 * SIZE.largest)):
        buckets = [
            plan(config(rollout={"engine_type": engine, "weight_bucket_bytes": bucket}))["sync"].owners["sync buckets"]
            for engine in ("sglang", "vllm")
        ]
        assert buckets[0] - buckets[1] == staged


def traced_run(config: Config) -> list[dict[str, float]]:
    SPMDPPOTrainer(config).fit()
    return read(config, "metrics.jsonl")


def test_what_stays_in_the_plan_is_what_the_ledger_of_a_run_finds(two_ranks, task, tmp_path):
    settings = make_config(
        task,
        tmp_path,
        algorithm={"advantage_estimator": "gae", "init_kl_coef": 0.05},
        report={"print_memory_ledger": True},
    )
    found = two_ranks.run(traced_run, settings)[0][2]
    loaded = load_config(settings.model.pretrain, "auto")
    critic = load_config(settings.model.pretrain, "auto", "trunk")
    planned = {peak.phase: peak.owners for peak in plan_memory(settings, *model_sizes(settings, loaded, critic), 2)}
    for phase in ("actor", "reference", "critic", "train", "sync"):
        ledger = ledger_peaks(found, phase)
        for owner, size in planned[phase].items():
            if owner.startswith(("actor", "critic", "initial_model", "engine")):
                assert ledger[owner.replace(" ", "_")] == pytest.approx(size, rel=0.01), (phase, owner)
    generate = ledger_peaks(found, "generate")
    assert generate["engine_weights"] == planned["generate"]["engine weights"]
    assert 0.7 * planned["generate"]["engine kv_cache"] < generate["engine_kv_cache"]
    assert generate["engine_kv_cache"] <= planned["generate"]["engine kv_cache"]
