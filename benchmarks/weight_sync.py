"""Weight sync: seconds, bytes and memory from the actor's shards to an engine that holds them, and of its sleep.

    python -m benchmarks.weight_sync --backends fsdp2 zero3 --engine_types vllm sglang --sizes 0.5b 7b

gather is the actor's part alone; sync is all of it, by --weight_check; the median of --repeats counts.
"""

import argparse
from collections import deque
from functools import partial
from itertools import count

import torch

from benchmarks.cases import Case, Row, Setup, extra_bytes, main, seconds, set_up
from lightrft.config.arguments import WeightCheck
from lightrft.models.lora import sent_weights
from lightrft.strategy.roles import hf_model_of
from lightrft.strategy.utils.broadcast_utils import BroadcastManager

MIB, GIB = 2**20, 2**30


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weight_bucket_bytes", type=int, default=512 * MIB)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--disable_engine_sleep", action="store_true")


def measure(case: Case, args: argparse.Namespace) -> Row:
    rollout = {
        "weight_bucket_bytes": args.weight_bucket_bytes,
        "enable_engine_sleep": not args.disable_engine_sleep,
        "generate_max_len": 512,
    }
    with set_up(case, args, rollout, {"prompt_max_len": 512}) as setup:
        first = seconds(setup.strategy, lambda: setup.strategy.update_engine_weights(setup.actor))
        row = {"first sync s": first} | measure_sync(setup, args)
        return row | ({} if args.disable_engine_sleep else measure_sleep(setup))


def measure_sync(setup: Setup, args: argparse.Namespace) -> Row:
    strategy, actor = setup.strategy, setup.actor
    weights = sent_weights(hf_model_of(actor))
    specs = strategy.weight_specs(weights, strategy.engine_dtype)
    num_bytes = sum(spec.num_bytes for spec in specs)
    versions = count(strategy.weight_version)

    @torch.no_grad()
    def gather() -> None:
        # Keeps nothing.
        deque(strategy.weight_buckets(weights, strategy.engine_dtype), maxlen=0)

    def sync(check: WeightCheck) -> float:
        bucket_bytes = args.weight_bucket_bytes
        manager = BroadcastManager(setup.engine, strategy.collectives, strategy.device, bucket_bytes, check)

        @torch.no_grad()
        def once() -> None:
            buckets = partial(strategy.weight_buckets, weights, strategy.engine_dtype)
            manager.broadcast_to_engine(specs, buckets, next(versions))

        return seconds(strategy, once, args.repeats)

    row: Row = {"GiB": num_bytes / GIB, "gather s": seconds(strategy, gather, args.repeats)}
    row |= {"sync off s": sync("off"), "sync sample s": sync("sample"), "sync full s": sync("full")}
    # With what the strategy does around it, as the trainer calls it.
    whole = seconds(strategy, lambda: strategy.update_engine_weights(actor), args.repeats)
    extra = extra_bytes(strategy.device, lambda: strategy.update_engine_weights(actor))
    most = 2 * max(args.weight_bucket_bytes, *(spec.num_bytes for spec in specs))
    return row | {
        "update_engine_weights s": whole,
        "GB/s": num_bytes / 1e9 / whole,
        "extra MiB": None if extra is None else extra / MIB,
        "limit MiB": most / MIB,
    }


def measure_sleep(setup: Setup) -> Row:
    """Of the adapter itself, once the engine is whole; its weights come back by a sync."""
    strategy = setup.strategy
    setup.engine.wake_up()
    engine = setup.engine.engine
    row: Row = {
        "sleep s": seconds(strategy, engine.sleep),
        "wake weights s": seconds(strategy, lambda: engine.wake_up(["weights"])),
        "wake KV s": seconds(strategy, lambda: engine.wake_up(["kv_cache"])),
    }
    strategy.update_engine_weights(setup.actor)
    return row


if __name__ == "__main__":
    main("benchmarks.weight_sync", measure, add_flags)
