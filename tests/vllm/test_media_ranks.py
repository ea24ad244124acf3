"""Runs on images and sounds with vLLM on two ranks: towers in shards, or a model each."""

from pathlib import Path
from typing import Any

import pytest

from lightrft.trainer import build_trainer
from tests.distributed.runs import BACKENDS, read
from tests.distributed.test_media_learning import media_config, mixed_task, steps_of
from tests.vllm.engines import start_vllm
from tests.vllm.test_ranks import START_SECONDS, VLLM, fresh_ranks
from tests.wide_models import save_wide_media

# By family: the backend, ranks of an engine, and what the run has besides.
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen2_5_vl": ("fsdp", 2, {"model": {"lora_rank": 2}}),
    "qwen3_vl": ("zero3", 2, {"model": {"freeze_prefix": ("visual",)}}),
    "qwen2_audio": ("fsdp", 1, {}),
}


def run(config: Any) -> list[dict[str, Any]]:
    start_vllm()
    build_trainer(config).fit()
    return steps_of(config)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", RUNS)
def test_a_step_on_rows_with_and_without_media_keeps_vllm_at_the_actors_log_probs(tmp_path: Path, family: str) -> None:
    """DIST-02, DIST-06: every second row is text, and every weight is verified at every sync."""
    backend, tp_size, changes = RUNS[family]
    task = mixed_task(tmp_path / "task", family)
    save_wide_media(task / "model", family)
    config = media_config(
        task,
        tmp_path / "run",
        2,
        strategy=BACKENDS[backend],
        rollout=VLLM
        | {"weight_check": "full", "engine_tp_size": tp_size}
        | {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "generate_max_len": 6},
        train={"train_batch_size": 16, "micro_train_batch_size": 4},
        reward={"reward_fn": f"{task / 'reward.py'}:letters"},
        **changes,
    )
    with fresh_ranks() as ranks:
        lines = ranks.run(run, config, timeout=START_SECONDS)[0]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["rollout/log_prob_mismatch"] < 1e-4 for line in lines)
    assert lines[0]["train/grad_norm"] > 0
    drawn = {row["response"] for row in read(config, "samples.jsonl") if row["step"] == 1}
    assert len(drawn) > 8
