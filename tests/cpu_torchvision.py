"""Repair of an environment: torchvision as PyPI has it for Linux, beside a torch without CUDA.

Processors of images and videos need torchvision's transforms. Its compiled operators are built for CUDA there; without
it they do not load, and importing torchvision, and with it half of transformers, stops at the first that is missing.
torchvision for a torch without CUDA is on PyTorch's own index; where that cannot be reached, this script has every
process of the environment declare the operators, which nothing here calls:

    python tests/cpu_torchvision.py
"""

import importlib.util
import sysconfig
from pathlib import Path

import torch

MODULE = "declare_torchvision_operators"
FINDER = '''"""Declares the operators that torchvision's import asks for, right before it."""

import sys


class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(cls)
            import torch

            cls.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, Finder)
'''


def operators_load(folder: Path) -> bool:
    """Whether torchvision's compiled operators fit this torch."""
    try:
        torch.ops.load_library(str(next(folder.glob("_C*.so"))))
    except OSError:
        return False
    return True


def main() -> None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        print("torchvision is not installed")
        return
    if operators_load(Path(spec.submodule_search_locations[0])):
        print("torchvision's operators load: nothing to repair")
        return
    packages = Path(sysconfig.get_path("purelib"))
    (packages / f"{MODULE}.py").write_text(FINDER)
    (packages / f"{MODULE}.pth").write_text(f"import {MODULE}\n")
    print(f"torchvision's operators do not load beside torch {torch.__version__}: {MODULE}.pth declares them")


if __name__ == "__main__":
    main()
