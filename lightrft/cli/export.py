"""`lightrft export`: a checkpoint becomes a Hugging Face folder."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lightrft.config import usage_errors


@dataclass(frozen=True)
class Arguments:
    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A checkpoint, or a folder of checkpoints or of a run, whose newest complete one is taken."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The new folder."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Dtype of the weights; by default what the run computed in."""
    adapter: bool = False
    """Write the adapter of a run with --lora_rank alone, in fp32 as a peft folder, instead of the merged model."""


def main(argv: Sequence[str]) -> int:
    arguments = tyro.cli(
        Arguments,
        prog="lightrft export",
        description="Writes a checkpoint's actor as a Hugging Face folder, with tokenizer and model card, on the CPU.",
        args=list(argv),
        use_underscores=True,
    )
    # Where DeepSpeed is installed, saving a model imports it; untold, it guesses the accelerator aloud.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # It takes seconds to import, and --help needs none of it.
    from lightrft.trainer.export import export_checkpoint

    with usage_errors():
        folder = export_checkpoint(arguments.checkpoint, arguments.output, arguments.dtype, arguments.adapter)
    print(f"{folder} -> {arguments.output}")
    return 0
