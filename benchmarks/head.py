"""The LM head: seconds and device memory of log-probs and of their backward pass, by tokens of a chunk.

    python -m benchmarks.head --sizes 0.5b 7b --chunk_sizes 128 192 512 2048

Rounding is how far the gradient of the head's weight is from the one that fp32 gives of the same numbers, relative to
its norm.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.cases import Row, environment, markdown
from benchmarks.models import SIZES
from lightrft.ops.log_probs import token_log_probs


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny"])
    parser.add_argument("--chunk_sizes", nargs="+", type=int, default=[128, 192, 512])
    parser.add_argument("--tokens", type=int, default=32768, help="of responses, in one micro-batch")
    parser.add_argument("--fp32", action="store_true", help="instead of bf16")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts")
    parser.set_defaults(engine_types=[], backends=[], nproc_per_node=1)
    return parser


def main() -> None:
    args = parser().parse_args()
    cases = itertools.product(args.sizes, args.chunk_sizes)
    sys.stdout.write(f"\n{environment(args)}\n\n{markdown([measure(*case, args) for case in cases])}\n")


def measure(size: str, chunk_size: int, args: argparse.Namespace) -> Row:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numbers = torch.Generator(device).manual_seed(0)
    vocabulary, width = SIZES[size]["vocab_size"], SIZES[size]["hidden_size"]
    dtype = torch.float32 if args.fp32 else torch.bfloat16
    hidden = torch.randn(args.tokens, width, generator=numbers, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=numbers, device=device) / width**0.5).to(dtype).requires_grad_()
    target_ids = torch.randint(vocabulary, (args.tokens,), generator=numbers, device=device)
    factors = torch.randn(args.tokens, generator=numbers, device=device)

    def log_probs(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_log_probs(hidden, weight, target_ids, 1.0, chunk_size)[0]

    def score() -> None:
        with torch.no_grad():
            log_probs(hidden, weight)

    def learn() -> None:
        (log_probs(hidden, weight) * factors).sum().backward()

    row: Row = {"size": size, "chunk": str(chunk_size)}
    for name, work in (("forward", score), ("forward and backward", learn)):
        once(work, device)
        measured = []
        for _ in range(args.repeats):
            hidden.grad = weight.grad = None
            measured.append(once(work, device))
        times, sizes = zip(*measured, strict=True)
        row |= {f"{name} ms": 1000 * median(times), f"{name}, extra MiB": sizes[0]}
    wide = hidden.detach().float(), weight.detach().float().requires_grad_()
    (log_probs(*wide) * factors).sum().backward()
    assert weight.grad is not None and wide[1].grad is not None
    row["rounding"] = ((weight.grad.float() - wide[1].grad).norm() / wide[1].grad.norm()).item()
    return row


def once(work: Callable[[], None], device: torch.device) -> tuple[float, float | None]:
    """Wall seconds, and MiB at the peak beside what was there; None on a CPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started, None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started, (torch.cuda.max_memory_allocated(device) - before) / 2**20


if __name__ == "__main__":
    main()
