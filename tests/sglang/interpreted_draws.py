"""Draws of the kernels that SGLang's schedulers run on a GPU, by Triton's interpreter on a CPU.

TRITON_INTERPRET=1 python -m tests.sglang.interpreted_draws CASES IDS
"""

import sys

import torch

from lightrft.strategy.sglang_utils import draw_kernels

if __name__ == "__main__":
    torch.save([draw_kernels.drawn(*case) for case in torch.load(sys.argv[1])], sys.argv[2])
