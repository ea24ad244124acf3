"""SGLang for tests: itself where it is installed, on a GPU or a CPU; elsewhere a package that follows its rules."""

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from lightrft.strategy.sglang_utils.sglang_engine import SGLangEngine
from tests.strategy.engine_conformance import Reference
from tests.wide_models import MAX_MODEL_LEN

FAKE, KERNELS = (Path(__file__).parent / name for name in ("fake", "cpu"))
ON_GPU = torch.cuda.is_available()


def is_real() -> bool:
    spec = find_spec("sglang")
    return spec is not None and spec.origin is not None and FAKE not in Path(spec.origin).parents


IS_REAL = is_real()
SLEEP_LEVEL = 2 if ON_GPU or not IS_REAL else None
"""SGLang cannot sleep on a CPU."""


def use_sglang() -> None:
    """From now on processes that this one starts find SGLang, or what stands for it, by `import sglang`."""
    if ON_GPU:
        return
    # Memory of a CPU travels by its name, as that of a GPU does, and not by a descriptor of this process. A rank has
    # the path from the process that started it, and must be told this all the same.
    torch.multiprocessing.set_sharing_strategy("file_system")
    folder = KERNELS if IS_REAL else FAKE
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(folder.parents[2]), *filter(None, paths)])
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


def engine_of(
    ref: Reference, *, sleep_level: int | None = SLEEP_LEVEL, takes_stop_strings: bool = True, **options
) -> SGLangEngine:
    use_sglang()
    return SGLangEngine(
        str(ref.folder),
        device=torch.device("cuda", 0) if ON_GPU else torch.device("cpu"),
        # On a CPU what other processes take and give back in the meantime counts as SGLang's.
        mem_util=0.1 if ON_GPU else 0.5,
        max_model_len=MAX_MODEL_LEN,
        sleep_level=sleep_level,
        tokenizer=ref.tokenizer if takes_stop_strings else None,
        enforce_eager=True,
        **{"dtype": torch.float32} | options,
    )
