"""What SGLang gets at its start: its arguments, the folder of the model, a port; and what is refused before."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, Qwen2VLProcessor

from lightrft.config import Config, DataConfig, ModelConfig, RolloutConfig
from lightrft.models.loading import load_config
from lightrft.strategy.engine import check_engine
from lightrft.strategy.sglang_utils import sglang_engine
from lightrft.strategy.sglang_utils.preconditions import attention_backends, engine_arguments, write_engine_folder
from lightrft.strategy.sglang_utils.sglang_engine import agreed_port
from tests import tiny_media, tiny_models


def arguments(**changes: object) -> dict:
    defaults: dict = {
        "dtype": torch.bfloat16,
        "mem_util": 0.4,
        "max_model_len": 1536,
        "sleeps": True,
        "tp_size": 2,
        "device": "cuda",
        "first_gpu": 4,
        "gpu_bytes": 80 * 2**30,
        "port": 2345,
        "enforce_eager": False,
        "takes_stop_strings": False,
        "timeout_seconds": 1830.2,
    }
    return engine_arguments(Path("/folder"), **defaults | changes)


def test_flags_become_sglang_s_arguments() -> None:
    """The context has room to spare, since SGLang quietly shortens responses near its end."""
    given = arguments()
    assert {name: given[name] for name in ("model_path", "load_format", "dtype", "tp_size", "base_gpu_id")} == {
        "model_path": "/folder",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "tp_size": 2,
        "base_gpu_id": 4,
    }
    assert (given["mem_fraction_static"], given["context_length"]) == (0.4, 1544)
    assert (given["nccl_port"], given["dist_timeout"]) == (2345, 1831)
    assert (given["enable_memory_saver"], given["disable_cuda_graph"]) == (True, False)
    assert given["skip_tokenizer_init"] and not arguments(takes_stop_strings=True)["skip_tokenizer_init"]
    assert arguments(enforce_eager=True)["disable_cuda_graph"]
    assert not arguments(sleeps=False)["enable_memory_saver"]
    assert given["cuda_graph_max_bs_decode"] == 512
    assert arguments(gpu_bytes=24 * 2**30)["cuda_graph_max_bs_decode"] is None


def test_the_loader_has_the_name_that_sglang_imports() -> None:
    [loader] = arguments()["custom_weight_loader"]
    module, name = loader.rsplit(".", 1)
    assert callable(getattr(importlib.import_module(module), name))


FLASH, TRITON = (None, None), ("triton", "triton_attn")


@pytest.mark.parametrize("files, backends", [([], TRITON), (["flash_ops.abi3.so"], FLASH)])
def test_triton_stands_in_for_flash_attention_where_that_is_not_installed(
    files: list[str], backends: tuple[str | None, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    for file in ["__init__.py", *files]:
        (package / file).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert attention_backends("cuda") == backends
    assert attention_backends("cpu") == ("torch_native", "sdpa")
    assert "sgl_kernel" not in sys.modules


@pytest.mark.parametrize("names_its_class", [True, False])
def test_sglang_s_folder_has_no_token_that_ends_a_response(tmp_path: Path, names_its_class: bool) -> None:
    source, folder = tmp_path / "source", tmp_path / "folder"
    tiny_models.save_model(source)
    if not names_its_class:
        settings = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(settings | {"architectures": None}))
    tokenizer = AutoTokenizer.from_pretrained(source)
    write_engine_folder(load_config(str(source), "padded"), tokenizer, folder)
    config, written = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (config.eos_token_id, config.architectures) == (None, ["Qwen2ForCausalLM"])
    assert config.hidden_size == 32 and "quantization_config" not in config.to_dict()
    assert json.loads((folder / "generation_config.json").read_text()).get("eos_token_id") is None
    assert (written.eos_token_id, written.get_vocab()) == (None, tokenizer.get_vocab())
    assert tokenizer.eos_token_id == 1


class Gathers:
    """Collectives of two ranks, of which the other has these ports."""

    def __init__(self, others: list[int]) -> None:
        self.others = iter(others)

    def all_gather_objects(self, port: int) -> list[int]:
        return [port, next(self.others)]


def test_engines_of_a_node_do_not_ask_for_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks see the same ports, so all draw again where two are equal."""
    free = iter([5000, 5001, 5002])
    monkeypatch.setattr(sglang_engine, "free_port", lambda: next(free))
    collectives = Gathers([5000, 5007])
    assert agreed_port(collectives) == 5001  # type: ignore[arg-type]
    assert agreed_port(None) == 5002


def test_a_folder_of_a_model_with_a_tower_has_its_processor_and_the_names_that_sglang_reads(tmp_path: Path) -> None:
    source = tiny_media.save_model(tmp_path / "source", "qwen2_vl")
    write_engine_folder(load_config(source, "padded"), None, tmp_path / "folder")
    written = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert written["vision_config"]["in_chans"] == 3 and written["architectures"] == ["Qwen2VLForConditionalGeneration"]
    processor = AutoProcessor.from_pretrained(tmp_path / "folder")
    assert isinstance(processor, Qwen2VLProcessor) and processor.tokenizer.eos_token is None


def test_fp32_is_refused_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norm kernel has no fp32, and would end the scheduler at the first token."""
    loaded = load_config(tiny_models.save_model(tmp_path), "padded")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = Config(ModelConfig("model", bf16=False), DataConfig("data"), RolloutConfig(engine_type="sglang"))
    with pytest.raises(ValueError, match=r"SGLang computes in bf16: .* Add --bf16, or set --engine_type torch\.$"):
        check_engine(config, loaded)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is of machines without a GPU")
def test_a_machine_without_a_gpu_and_a_quantised_model_are_refused(tmp_path: Path) -> None:
    loaded = load_config(tiny_models.save_model(tmp_path), "padded")
    config = Config(ModelConfig("model"), DataConfig("data"), RolloutConfig(engine_type="sglang"))
    with pytest.raises(ValueError, match=r"SGLang runs on GPUs: there is none here\. Set --engine_type torch\.$"):
        check_engine(config, loaded)
    loaded.hf_config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(NotImplementedError, match=r"SGLang gets its weights from the actor.* is quantised"):
        check_engine(config, loaded)
