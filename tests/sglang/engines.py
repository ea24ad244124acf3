"""SGLang for tests: itself on a GPU, or in its place, on a CPU, a package that follows its rules."""

import importlib.util
import os
from pathlib import Path

import torch

from lightrft.strategy.sglang_utils.sglang_engine import SGLangEngine
from tests.strategy.engine_conformance import Reference
from tests.wide_models import MAX_MODEL_LEN

FAKE = Path(__file__).parent / "fake"
IS_REAL = torch.cuda.is_available() and importlib.util.find_spec("sglang") is not None


def use_fake() -> None:
    """From now on `import sglang` finds the package of the tests in processes that this one starts."""
    if IS_REAL:
        return
    # Memory of a CPU travels by its name, as that of a GPU does, and not by a descriptor of this process. A rank has
    # the path from the process that started it, and must be told this all the same.
    torch.multiprocessing.set_sharing_strategy("file_system")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(FAKE) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(FAKE), str(FAKE.parents[2]), *filter(None, paths)])


def engine_of(
    ref: Reference, *, sleep_level: int | None = 2, takes_stop_strings: bool = True, **options
) -> SGLangEngine:
    use_fake()
    # Its attention kernel for fp32 would compute in tf32.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    return SGLangEngine(
        str(ref.folder),
        device=torch.device("cuda", 0) if IS_REAL else torch.device("cpu"),
        mem_util=0.1,
        max_model_len=MAX_MODEL_LEN,
        sleep_level=sleep_level,
        tokenizer=ref.tokenizer if takes_stop_strings else None,
        enforce_eager=True,
        **{"dtype": torch.float32} | options,
    )
