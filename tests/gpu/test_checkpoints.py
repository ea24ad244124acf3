"""Checkpoints of shards that live on GPUs, on as many of them as two."""

import os
import signal
from pathlib import Path

import pytest
import torch

from lightrft.config import dump_yaml
from tests.distributed.resumed_runs import USER_CODE, assert_same, names, six_steps
from tests.distributed.runs import save_task
from tests.distributed.torchrun import torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "owners",
    [
        {"strategy": {"adam_offload": True}, "model": {"bf16": True}},
        {"strategy": {"fsdp_cpu_offload": True}},
        {},
        {"strategy": {"fsdp": False, "zero_stage": 2, "adam_offload": True}, "model": {"bf16": True}},
        {"strategy": {"fsdp": False, "zero_stage": 3}},
    ],
    ids=["adam_offload", "cpu_offload", "on_device", "zero2_adam_offload", "zero3"],
)
def test_six_steps_equal_three_a_stop_and_three_on_gpus(tmp_path: Path, owners):
    """CKPT-03"""
    save_task(tmp_path)
    (tmp_path / "user_code.py").write_text(USER_CODE)
    algorithm = {"advantage_estimator": "gae", "init_kl_coef": 0.05}

    def run(name: str, *signals: int):
        options = {"save_hf_ckpt": True, "load_checkpoint": True}
        config = six_steps(tmp_path, tmp_path / name, **owners, algorithm=algorithm, checkpoint=options)
        (tmp_path / "run.yaml").write_text(dump_yaml(config))
        ended = torchrun(
            tmp_path / "user_code.py",
            "--config",
            str(tmp_path / "run.yaml"),
            env={
                "SIGNALS": " ".join(str(int(number)) for number in signals),
                "SECONDS": "1" if signals else "0",
                "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0,1"),
            },
            launch=("--standalone", f"--nproc_per_node={min(2, torch.cuda.device_count())}"),
        )
        assert ended.left == []
        return config, ended

    straight, ended = run("straight")
    assert ended.returncode == 0, ended.output
    broken, ended = run("broken", signal.SIGTERM)
    assert ended.returncode != 0 and names(broken) == ["step_00000003"], ended.output
    broken, ended = run("broken")
    assert ended.returncode == 0 and "going on from" in ended.output, ended.output
    assert_same(broken, straight)
