from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrft.config import Config, DataConfig, ModelConfig, RolloutConfig
from lightrft.models.loading import LoadedConfig, load_config
from lightrft.models.multimodal import FAMILIES
from lightrft.strategy.engine import check_engine
from lightrft.strategy.utils.expected_weights import check_memory_share, weight_specs
from lightrft.strategy.vllm_utils.library import compilation_config, multicast_is_off
from lightrft.strategy.vllm_utils.media import ITEMS
from tests import tiny_media_models, tiny_models
from tests.wide_models import wide_media_config

GIB = 2**30


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    return load_config(tiny_models.save_model(tmp_path), "padded")


def config(**rollout: object) -> Config:
    return Config(ModelConfig("model"), DataConfig("data"), RolloutConfig(**{"engine_type": "vllm"} | rollout))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is of machines without a GPU")
def test_sleep_without_a_gpu_is_refused_with_the_flag_to_add(loaded: LoadedConfig) -> None:
    with pytest.raises(ValueError, match=r"vLLM can sleep on GPUs only.*Add --disable_engine_sleep\.$"):
        check_engine(config(), loaded)
    check_engine(config(enable_engine_sleep=False), loaded)
    check_engine(replace(config(), rollout=RolloutConfig()), loaded)


def test_a_quantised_model_is_refused(loaded: LoadedConfig) -> None:
    loaded.hf_config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(NotImplementedError, match="is quantised"):
        check_engine(config(enable_engine_sleep=False), loaded)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_every_family_that_takes_media_are_admitted(family: str) -> None:
    hf_config = wide_media_config(family)
    check_engine(config(enable_engine_sleep=False), LoadedConfig("model", hf_config, "padded", "sdpa"))
    assert family in ITEMS


def test_an_encoder_of_other_sounds_than_vllms_is_refused_with_both_lengths() -> None:
    """50 positions of 2 frames each."""
    loaded = LoadedConfig("model", tiny_media_models.config("qwen2_audio"), "padded", "sdpa")
    with pytest.raises(NotImplementedError, match=r"3000 frames of sound: model hears 100 .*Set --engine_type torch"):
        check_engine(config(enable_engine_sleep=False), loaded)
    check_engine(config(engine_type="torch"), loaded)


def test_a_share_that_cannot_hold_the_weights_is_refused_with_the_numbers() -> None:
    """14 GiB over 2 ranks are 7; 0.08 of 80 GiB is 6.4, 0.1 of it 8. 7 / 80 = 0.0875."""
    with pytest.raises(ValueError) as error:
        check_memory_share(14 * GIB, 80 * GIB, mem_util=0.08, tp_size=2)
    for part in ("14.0 GiB", "engine_tp_size=2", "7.0 GiB a rank", "engine_mem_util=0.08 of 80.0 GiB is 6.4 GiB"):
        assert part in str(error.value)
    assert "Set --engine_mem_util above 0.09, or raise --engine_tp_size." in str(error.value)
    check_memory_share(14 * GIB, 80 * GIB, mem_util=0.1, tp_size=2)


def test_specs_are_those_of_the_model_that_is_sent(tmp_path: Path, loaded: LoadedConfig) -> None:
    """A tied embedding once."""
    model = tiny_models.random_model(tiny_models.qwen2())
    specs = weight_specs(loaded, torch.bfloat16)
    assert [(spec.name, spec.shape) for spec in specs] == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    assert {spec.dtype for spec in specs} == {torch.bfloat16}


@pytest.mark.parametrize("variable", [("NCCL_NVLS_ENABLE", "0"), ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")], ids=str)
def test_where_multicast_is_switched_off_vllm_fuses_no_all_reduce(
    variable: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    assert compilation_config() == {} and not multicast_is_off()
    monkeypatch.setenv(*variable)
    assert multicast_is_off()
    assert compilation_config() == {"pass_config": {"fuse_allreduce_rms": False}}
