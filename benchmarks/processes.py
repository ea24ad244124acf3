"""Processes: torchrun commands of benchmarks, several at once, of which none is left behind."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.2


def run_together(
    commands: Sequence[Sequence[str]], nproc_per_node: int, seconds: float, variables: Sequence[Mapping[str, str]] = ()
) -> str | None:
    """Runs scripts or modules under torchrun, each with so many ranks, until all have ended or one has failed.

    Args:
        commands: What comes behind torchrun's own flags.
        seconds: Those that take longer are ended.
        variables: Of each command's environment, beside this one's.

    Returns:
        What went wrong, or None.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc_per_node)]
    # torchrun itself sets this for several ranks alone, beside which one would have another measure.
    common = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    processes = [
        subprocess.Popen([*torchrun, *command], cwd=ROOT, env=common | dict(own))
        for command, own in zip(commands, variables or [{}] * len(commands), strict=True)
    ]
    deadline = time.monotonic() + seconds
    try:
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if time.monotonic() > deadline:
                return f"over {seconds:.0f} s"
            time.sleep(_POLL_SECONDS)
    finally:
        for process in processes:
            # torchrun ends its ranks then.
            process.terminate()
        for process in processes:
            process.wait()
    return f"failed ({', '.join(str(code) for code in codes if code)})" if any(codes) else None
