"""Families of algorithms on a GPU, in bf16, with the torch engine and vLLM."""

import json
import os
import shlex
from pathlib import Path

import pytest
import torch

from tests import tiny_models
from tests.distributed.torchrun import torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TRAIN = Path(__file__).parents[2] / "examples/gsm8k_geo3k/train_colocate.py"
FLAGS = shlex.split(
    "--fsdp --bf16 --rollout_batch_size 16 --n_samples_per_prompt 4 --train_batch_size 32 --micro_train_batch_size 16 "
    "--prompt_max_len 64 --generate_max_len 64 --num_episodes 20 --lr_warmup_steps 0 --actor_learning_rate 1e-5 "
    "--init_kl_coef 0 --max_steps 3 --engine_mem_util 0.3 --enforce_eager"
)
FAMILIES = {
    "gspo": "--advantage_estimator rloo --policy_loss gspo --eps_clip 3e-4 --eps_clip_high 4e-4",
    "gmpo": "--advantage_estimator dr_grpo --policy_loss gmpo --eps_clip 0.4 --loss_agg_mode seq-mean-token-sum-norm",
    "sapo": "--advantage_estimator reinforce++_baseline --policy_loss sapo",
    "cpgd": "--advantage_estimator cpgd --policy_loss cpgd --policy_drift_coef 0.01 --high_entropy_token_ratio 0.2",
    "remax": "--advantage_estimator remax --rollout_correction tis",
    "cispo on the engine's log-probs": "--advantage_estimator group_norm --policy_loss cispo --old_log_probs engine",
    "dapo": "--advantage_estimator group_norm --eps_clip_high 0.28 --dual_clip 3 --dynamic_sampling --overlong_buffer "
    "--overlong_buffer_len 16",
    "ppo": "--advantage_estimator gae --reward_running_norm --reward_clip 3 --rollout_correction sequence_mis",
    "distillation": "--advantage_estimator on_policy_distillation --policy_loss policy_gradient",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("algorithms")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = tiny_models.qwen2(**sizes, max_position_embeddings=1024)
    tiny_models.save_model(root / "model", config)
    tiny_models.save_model(root / "teacher", config, seed=1)
    rows = [{"input": f"{i}+{i * 7}=", "label": str(i % 10)} for i in range(64)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "reward.py").write_text("def is_odd(response):\n    return float(len(response) % 2)\n")
    return root


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_train_on_the_engines_samples(folder: Path, tmp_path: Path, family: str, engine: str):
    if engine != "torch":
        pytest.importorskip(engine)
    flags = [*FLAGS, *shlex.split(FAMILIES[family]), "--engine_type", engine, "--save_path", str(tmp_path)]
    flags += ["--pretrain", str(folder / "model"), "--prompt_data", str(folder / "prompts.jsonl")]
    flags += ["--reward_fn", f"{folder / 'reward.py'}:is_odd"]
    flags += ["--teacher_pretrain", str(folder / "teacher")] if family == "distillation" else []
    flags = [flag for flag in flags if engine == "vllm" or flag != "--enforce_eager"]
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env = {"CUDA_VISIBLE_DEVICES": device}
    ended = torchrun(TRAIN, *flags, env=env, launch=("--standalone", "--nproc_per_node=1"), timeout=300)
    assert ended.returncode == 0 and ended.left == [], ended.output[-8000:]
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][1:]
    assert len(steps) == 3
    for step in steps:
        assert step["train/grad_norm"] > 0 and step["train/skipped_steps"] == 0
        assert step["rollout/log_prob_mismatch"] <= 0.02
    if "correction/weight" in steps[0]:
        assert steps[0]["correction/weight"] == pytest.approx(1.0, abs=0.05)
