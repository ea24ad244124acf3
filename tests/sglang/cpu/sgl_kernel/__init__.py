"""In the place of SGLang's kernels, for GPUs and for CPUs with AMX: names that it imports, and never calls here."""

import sys
from dataclasses import dataclass
from types import ModuleType

import torch

MODULES = ("elementwise", "flash_attn", "kvcacheio", "mamba", "quantization", "scalar_type", "speculative", "utils")
OPERATORS = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
"""Those that models of SGLang name where they are imported."""


@dataclass(frozen=True)
class Kernel:
    """A name, and whatever is below it."""

    name: str

    def __getattr__(self, name: str) -> "Kernel":
        return _named(self.name, name)

    def __call__(self, *arguments: object, **options: object) -> None:
        raise NotImplementedError(f"{self.name} is not there on a CPU")


class Kernels(ModuleType):
    def __getattr__(self, name: str) -> Kernel:
        return _named(self.__name__, name)


def __getattr__(name: str) -> Kernel:
    return _named(__name__, name)


def _named(parent: str, name: str) -> Kernel:
    # Whoever looks for a special method must not find one.
    if name.startswith("__"):
        raise AttributeError(name)
    return Kernel(f"{parent}.{name}")


for module in MODULES:
    sys.modules[f"{__name__}.{module}"] = Kernels(f"{__name__}.{module}")
library = torch.library.Library(__name__, "FRAGMENT")
for operator in OPERATORS:
    library.define(f"{operator}(Tensor a, Tensor b) -> Tensor")
