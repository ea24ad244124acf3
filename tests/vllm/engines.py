"""Models and engines for tests on real vLLM."""

import os

import torch

from lightrft.strategy.utils.collectives import Collectives
from lightrft.strategy.utils.devices import free_port, rank_device
from tests.strategy.engine_conformance import Reference
from tests.wide_models import MAX_MODEL_LEN


def start_vllm() -> None:
    """Imports vLLM with settings for tests; a process alone stands for torchrun's only rank."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "MASTER_PORT" not in os.environ:
        os.environ.update(alone, MASTER_PORT=str(free_port()))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if not torch.cuda.is_available():
        # One function of its sampler would be compiled for 12 seconds.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Its attention kernel for fp32 on a GPU would compute in tf32.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    from vllm.model_executor.layers import utils

    # vLLM for CPUs repacks weights for its kernels and frees them: no update could reach them. On a GPU it does not.
    utils.dispatch_cpu_unquantized_gemm = keep_weights


def keep_weights(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def engine_of(
    ref: Reference,
    *,
    dtype: torch.dtype = torch.float32,
    sleep_level: int | None = None,
    tp_size: int = 1,
    mem_util: float = 0.1,
    enforce_eager: bool = True,
    collectives: Collectives | None = None,
):
    start_vllm()
    from lightrft.strategy.vllm_utils.vllm_engine import VLLMEngine

    return VLLMEngine(
        str(ref.folder),
        device=rank_device(int(os.environ["LOCAL_RANK"])),
        dtype=dtype,
        mem_util=mem_util,
        max_model_len=MAX_MODEL_LEN,
        sleep_level=sleep_level,
        tp_size=tp_size,
        enforce_eager=enforce_eager,
        takes_stop_strings=True,
        collectives=collectives,
    )
