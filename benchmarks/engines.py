"""Weight sync and rollout of each engine from one start of it, which can take minutes.

python -m benchmarks.engines --backends fsdp2 zero3 --engine_types vllm sglang --sizes 0.5b 1.5b 7b 14b
"""

from benchmarks import rollout, weight_sync
from benchmarks.cases import main

if __name__ == "__main__":
    main("benchmarks.engines", [weight_sync.BENCHMARK, rollout.BENCHMARK])
