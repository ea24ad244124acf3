"""SGLang on a GPU: the adapter on a 0.5B model in bf16, at both sleep levels, and how processes end.

The engines' suite needs fp32, which SGLang's kernels for GPUs do not take: it runs on a CPU (`make test-sglang`).
"""

import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightrft.strategy.engine import ManagedEngine
from lightrft.strategy.sglang_utils.sglang_engine import SGLangEngine
from lightrft.types import GenerationOutput, PromptExample, SamplingParams
from tests import tiny_models
from tests.distributed.torchrun import torchrun
from tests.gpu.model import save_qwen2
from tests.sglang.calls import wait_until_gone
from tests.sglang.engines import engine_of
from tests.strategy.engine_conformance import Reference, load
from tests.wide_models import MAX_MODEL_LEN

TRAIN = Path(__file__).parents[2] / "examples/gsm8k_geo3k/train_colocate.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang"),
    pytest.mark.timeout(600),
]
SAMPLED = SamplingParams(max_new_tokens=128)
PROMPTS = torch.randint(5, 150_000, (64, 64), generator=torch.Generator().manual_seed(7)).tolist()
BATCH = [PromptExample(row, prompt="", prompt_ids=ids) for row, ids in enumerate(PROMPTS)]
SEEDS = [[row] for row in range(len(BATCH))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("qwen2")
    save_qwen2(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval(), folder


@pytest.fixture(scope="module")
def engine(model: tuple[PreTrainedModel, Path]) -> Iterator[ManagedEngine]:
    """At level 2, with the model's weights. One start for the tests of this module."""
    reference = Reference(model[0], tiny_models.tokenizer(), model[1])
    started = time.monotonic()
    engine = engine_of(reference, dtype=torch.bfloat16, sleep_level=2, takes_stop_strings=False)
    print(f"SGLang starts in {time.monotonic() - started:.0f} s; {engine.device_bytes()}")
    managed = ManagedEngine(engine, 2)
    load(managed, model[0])
    yield managed
    engine.close()


@torch.no_grad()
def mismatch(model: PreTrainedModel, outputs: list[list[GenerationOutput]], temperature: float = 1.0) -> float:
    """Mean absolute difference in nats per token from a Hugging Face forward."""
    differences = []
    for example, [output] in zip(BATCH, outputs, strict=True):
        ids = torch.tensor([example.prompt_ids + output.response_ids], device=model.device)
        logits = model(input_ids=ids).logits[0, len(example.prompt_ids) - 1 : -1].float() / temperature
        expected = logits.log_softmax(-1).gather(-1, ids[0, len(example.prompt_ids) :, None]).squeeze(-1).cpu()
        differences.append((torch.tensor(output.log_probs) - expected).abs())
    return torch.cat(differences).mean().item()


def test_it_generates_and_takes_weights(engine: ManagedEngine, model: tuple[PreTrainedModel, Path]) -> None:
    """WGT-01: the log-probs are the model's, whose every bit SGLang holds."""
    weights = [(name, weight.detach()) for name, weight in model[0].named_parameters()]
    assert engine.verify_weights(weights) == []
    [(name, weight), *_] = [pair for pair in weights if pair[0].endswith("3.self_attn.v_proj.weight")]
    changed = weight.clone()
    changed[5, 7] += 0.1
    assert engine.verify_weights([(name, changed)]) == [name]
    load(engine, model[0], version=2)
    found = mismatch(model[0], engine.generate(BATCH, SAMPLED, SEEDS))
    print(f"mean |log-prob difference| to Hugging Face in bf16: {found:.4f}")
    assert found <= 0.02


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 20, "temperature": 1.3}])
def test_log_probs_are_of_the_whole_vocabulary_at_the_temperature(
    engine: ManagedEngine, model: tuple[PreTrainedModel, Path], change: dict[str, float]
) -> None:
    """NUM-01, NUM-02."""
    params = replace(SAMPLED, **change)
    assert mismatch(model[0], engine.generate(BATCH, params, SEEDS), params.temperature) <= 0.02


def test_sleep_gives_back_what_the_engine_held(engine: ManagedEngine, model: tuple[PreTrainedModel, Path]) -> None:
    """WGT-03: and after it the weights are right."""
    engine.generate(BATCH, SAMPLED, SEEDS)
    engine.register_sync(lambda: load(engine, model[0]))
    held, free = engine.device_bytes(), torch.cuda.mem_get_info()[0]
    started = time.monotonic()
    engine.sleep()
    seconds = time.monotonic() - started
    freed = torch.cuda.mem_get_info()[0] - free
    print(f"sleep takes {seconds:.3f} s and frees {freed / 2**30:.1f} of {sum(held.values()) / 2**30:.1f} GiB")
    assert freed > 0.95 * (held["weights"] + held["kv_cache"]) > 2**30
    assert mismatch(model[0], engine.generate(BATCH, SAMPLED, SEEDS)) <= 0.02


def test_twenty_syncs_leave_the_memory_as_it_was(engine: ManagedEngine, model: tuple[PreTrainedModel, Path]) -> None:
    """WGT-11: in both processes, within 1 % of what is used; the staging buffer is given back."""
    before = torch.cuda.memory_allocated()
    used, seconds = [], []
    for version in range(22):
        started = time.monotonic()
        load(engine, model[0], version)
        seconds.append(time.monotonic() - started)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    print(f"a sync, weight by weight, takes {sorted(seconds)[11]:.3f} s")
    assert used[-1] <= 1.01 * used[1] and torch.cuda.memory_allocated() - before < 2**20


def test_level_1_keeps_the_weights(engine: ManagedEngine, model: tuple[PreTrainedModel, Path]) -> None:
    """WGT-03: they are right after it, without a sync."""
    sglang = engine.engine
    assert isinstance(sglang, SGLangEngine)
    load(engine, model[0])
    engine.wake_up()
    held, sglang.sleep_level = sglang.device_bytes(), 1
    sglang.sleep()
    assert sglang.device_bytes() == held | {"kv_cache": 0}
    sglang.wake_up()
    sglang.sleep_level = 2
    assert mismatch(model[0], engine.generate(BATCH, SAMPLED, SEEDS)) <= 0.02


def test_ids_that_must_not_be_drawn_have_probability_0(
    engine: ManagedEngine, model: tuple[PreTrainedModel, Path]
) -> None:
    """All but two: their log-probs are those of a choice between them."""
    kept = [7, 1234]
    params = replace(SAMPLED, suppressed_ids=tuple(set(range(model[0].config.vocab_size)) - {*kept}))
    load(engine, model[0])
    outputs = [output for [output] in engine.generate(BATCH[:4], params, SEEDS[:4])]
    assert {i for output in outputs for i in output.response_ids} == {*kept}
    ids = torch.tensor([PROMPTS[0]], device="cuda")
    with torch.no_grad():
        expected = model[0](input_ids=ids).logits[0, -1, kept].float().log_softmax(-1).tolist()
    first = outputs[0]
    assert first.log_probs is not None
    assert first.log_probs[0] == pytest.approx(expected[kept.index(first.response_ids[0])], abs=0.1)


@pytest.fixture
def data(tmp_path: Path, model: tuple[PreTrainedModel, Path]) -> list[str]:
    """Flags of a run that generates for long."""
    rows = [{"input": f"{i}+{i * 7}=" * 8, "label": str(i % 10)} for i in range(64)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def is_odd(response):\n    return float(len(response) % 2)\n")
    flags = shlex.split(
        "--fsdp --bf16 --engine_type sglang --enforce_eager --engine_mem_util 0.2 --advantage_estimator group_norm "
        "--init_kl_coef 0 --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 256 --num_episodes 50 "
        "--max_tokens_per_micro_batch 16384 --prompt_max_len 128 --generate_max_len 1024 --lr_warmup_steps 0"
    )
    flags += ["--pretrain", str(model[1]), "--prompt_data", str(tmp_path / "prompts.jsonl")]
    return [*flags, "--reward_fn", f"{tmp_path / 'reward.py'}:is_odd", "--save_path", str(tmp_path / "run")]


@pytest.mark.parametrize("victim", ["scheduler", "rank"])
def test_a_killed_process_ends_the_run_and_leaves_nothing(data: list[str], tmp_path: Path, victim: str) -> None:
    """In the middle of a generation, within 45 seconds, with the process's name."""
    torch.cuda.empty_cache()
    killed: dict[str, float] = {}
    seen: list[psutil.Process] = []

    def kill_once_it_has_generated() -> None:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
            time.sleep(0.1)
        time.sleep(1.0)
        [launcher] = [child for child in psutil.Process().children() if "torch.distributed.run" in child.cmdline()]
        seen.extend(launcher.children(recursive=True))
        name = "sglang::scheduler" if victim == "scheduler" else "train_colocate.py"
        [process, *_] = [process for process in seen if any(name in part for part in process.cmdline()[:3])]
        killed["pid"], killed["at"] = process.pid, time.time()
        os.kill(process.pid, signal.SIGKILL)

    threading.Thread(target=kill_once_it_has_generated, daemon=True).start()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    ranks = min(2, torch.cuda.device_count())
    launch = ("--standalone", f"--nproc_per_node={ranks}")
    ended = torchrun(TRAIN, *data, env={"CUDA_VISIBLE_DEVICES": devices}, launch=launch, timeout=400, grace=10)
    seconds = ended.ended - killed["at"]
    print(f"{seconds:.1f} s after the kill of a {victim} all has ended")
    assert ended.returncode != 0 and seconds < 45 and ended.left == []
    if victim == "scheduler":
        assert f"(pid {killed['pid']}) has ended with exit code -9" in ended.output, ended.output[-6000:]
    assert wait_until_gone([process.pid for process in seen]) == []


def test_the_longest_context_is_the_engine_s(engine: ManagedEngine) -> None:
    ids = (PROMPTS[0] * 10)[: MAX_MODEL_LEN - 8]
    example = PromptExample(0, prompt="", prompt_ids=ids)
    [[output]] = engine.generate([example], replace(SAMPLED, max_new_tokens=8), [[1]])
    assert len(output.response_ids) == 8
