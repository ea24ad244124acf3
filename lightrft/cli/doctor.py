"""`lightrft doctor`: what this machine has, and what is missing for which flag."""

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.console import Console
from rich.text import Text

from lightrft.cli.tables import sections_table
from lightrft.config.arguments import EngineType
from lightrft.config.flags import flag_types
from lightrft.strategy.torch_utils.host_memory import host_free_bytes

USAGE = """usage: lightrft doctor

Shows what this machine has, and what is missing for which flag.
The exit code is 1 where a required package is missing or too old."""

Verdict: TypeAlias = Literal["OK", "missing", "too old", "too new", "look", ""]
STYLES: Mapping[Verdict, str] = {
    "OK": "green",
    "missing": "bold red",
    "too old": "bold red",
    "too new": "yellow",
    "look": "yellow",
    "": "",
}

OPTIONAL = {
    "wandb": ("--use_wandb", "use_wandb"),
    "deepspeed": ("training without --fsdp", "zero_stage"),
    "vllm": ("--engine_type vllm", "engine_type"),
    "sglang": ("--engine_type sglang", "engine_type"),
    "torchvision": ("images and videos", "image_key"),
    "av": ("videos", "video_key"),
    "soundfile": ("sounds", "audio_key"),
    "soxr": ("sounds", "audio_key"),
    "fastapi": ("lightrft serve-rm", "remote_rm_url"),
    "uvicorn": ("lightrft serve-rm", "remote_rm_url"),
}
"""Packages that a run can do without: what each is needed for, and the flag that this begins with."""

GIB = 2**30
FEW_SHARED_BYTES = GIB
"""NCCL and engines put buffers into /dev/shm; a container often has 64 MB of it."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    found: str
    verdict: Verdict = ""
    remark: str = ""
    required: bool = False

    @property
    def prevents_runs(self) -> bool:
        return self.required and self.verdict in ("missing", "too old")


def main(argv: Sequence[str]) -> int:
    """Prints the report; returns 1 where something required is missing or too old."""
    if argv:
        is_help = argv[0] in ("-h", "--help")
        print(USAGE, file=sys.stdout if is_help else sys.stderr)
        return 0 if is_help else 2
    required = list(required_packages())
    console = Console()
    sections = {"Required": lines(required), "Optional": lines(optional_packages()), "Machine": lines(machine())}
    console.print(sections_table(sections, widths=(17, 12, 7)))
    preventing = [finding.name for finding in required if finding.prevents_runs]
    if preventing:
        console.print(f"\nInstall first, in the range above: {', '.join(preventing)}.", style="bold red")
    else:
        console.print("\nNothing that every run needs is missing.", style="green")
    return 1 if preventing else 0


def lines(findings: Iterable[Finding]) -> list[list[str | Text]]:
    return [[f.name, f.found, Text(f.verdict, STYLES[f.verdict]), f.remark] for f in findings]


# Packages


def required_packages() -> Iterator[Finding]:
    """Python and the packages of pyproject.toml."""
    python = SpecifierSet(metadata.metadata("lightrft")["Requires-Python"])
    yield judged("python", platform.python_version(), python)
    for requirement in requirements(extra=False):
        yield judged(requirement.name, installed_version(requirement.name), requirement.specifier)


def optional_packages() -> Iterator[Finding]:
    """What only some flags need: its version, or the flag that it is missing for."""
    yield Finding("torch engine", "built in", "OK", "--engine_type torch, on CPU and GPU")
    supported = {requirement.name: requirement.specifier for requirement in requirements(extra=True)}
    for name, (purpose, flag) in OPTIONAL.items():
        version = installed_version(name)
        if not is_supported(name, flag):
            yield Finding(name, version or "-", remark=f"not supported yet: {purpose}")
        elif version is None:
            yield Finding(name, "-", "missing", f"needed for {purpose}")
        else:
            verdict = verdict_on(version, specifier := supported.get(name, SpecifierSet()))
            yield Finding(name, version, verdict, f"{in_words(specifier)}for {purpose}")


def is_supported(name: str, flag: str) -> bool:
    """Whether any flag uses the package already."""
    return name in get_args(EngineType) if flag == "engine_type" else flag in flag_types()


def requirements(extra: bool) -> list[Requirement]:
    """What pyproject.toml asks for in every run, or as an extra."""
    everything = [Requirement(text) for text in metadata.requires("lightrft") or []]
    return [r for r in everything if (r.marker is not None and "extra" in str(r.marker)) == extra]


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def judged(name: str, version: str | None, supported: SpecifierSet) -> Finding:
    """A required package against its range."""
    if version is None:
        return Finding(name, "-", "missing", in_words(supported), required=True)
    return Finding(name, version, verdict_on(version, supported), in_words(supported), required=True)


def in_words(supported: SpecifierSet) -> str:
    """The range, lower bound first."""
    ordered = sorted(supported, key=lambda part: Version(part.version))
    return f"supported: {', '.join(map(str, ordered))} " if ordered else ""


def verdict_on(version: str, supported: SpecifierSet) -> Verdict:
    # A local build such as 2.13.0+cpu, or a release candidate, is that version.
    if supported.contains(version, prereleases=True):
        return "OK"
    lowest = [Version(part.version) for part in supported if part.operator in (">=", ">", "==", "~=")]
    return "too old" if any(Version(version) < bound for bound in lowest) else "too new"


# Machine


def machine() -> Iterator[Finding]:
    yield from gpus()
    cores = usable_cores()
    available = f"{host_free_bytes() / GIB:.1f} GiB available to this process"
    yield Finding("host memory", f"{psutil.virtual_memory().total / GIB:.1f} GiB", remark=available)
    yield Finding("cores", str(cores), remark="that this process may use")
    yield omp_threads(os.environ, cores)
    yield shared_memory()


def usable_cores() -> int:
    """Cores that this process may use; other systems than Linux do not say, and have all of them."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def gpus() -> Iterator[Finding]:
    """Each GPU that torch sees, and the driver; or why a run is on the CPU."""
    if installed_version("torch") is None:
        yield Finding("GPU", "unknown", remark="torch is missing")
        return
    import torch

    driver = driver_version()
    if not torch.cuda.is_available():
        hidden = f"driver {driver}, but torch {torch.__version__} sees no GPU. " if driver else ""
        yield Finding("GPU", "none", "look" if hidden else "", f"{hidden}A run is on the CPU, with gloo")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{properties.total_memory / GIB:.0f} GiB", "OK", properties.name)
    yield Finding("driver", driver or "unknown", remark=f"torch is built for CUDA {torch.version.cuda}")


def driver_version() -> str | None:
    """NVIDIA's kernel driver, or None without one."""
    path = Path("/proc/driver/nvidia/version")
    if not path.is_file():
        return None
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu ...
    words = path.read_text().split()
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)


def omp_threads(environment: Mapping[str, str], cores: int) -> Finding:
    """Threads of each rank; ranks whose threads spin for the same cores are up to eight times slower."""
    threads, policy = environment.get("OMP_NUM_THREADS"), environment.get("OMP_WAIT_POLICY")
    advice = f"for several ranks on {cores} cores set OMP_NUM_THREADS=1 and OMP_WAIT_POLICY=PASSIVE"
    if threads == "1" and policy is not None and policy.upper() == "PASSIVE":
        return Finding("OMP_NUM_THREADS", threads, "OK", "OMP_WAIT_POLICY=PASSIVE")
    return Finding("OMP_NUM_THREADS", threads or "unset", "look", advice)


def shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", "none", "look", "/dev/shm is missing: NCCL between GPUs of a host needs it")
    total = psutil.disk_usage(str(path)).total
    if total < FEW_SHARED_BYTES:
        return Finding("shared memory", f"{total / GIB:.2f} GiB", "look", "start the container with --shm-size 16g")
    return Finding("shared memory", f"{total / GIB:.1f} GiB", "OK", "/dev/shm")
