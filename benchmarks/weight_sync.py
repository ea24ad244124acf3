"""Weight sync: seconds, bytes and memory from the actor's shards to an engine that holds them, and of its sleep.

    python -m benchmarks.weight_sync --backends fsdp2 zero3 --engine_types vllm sglang --sizes 0.5b 7b

gather is the actor's part alone; sync is all of it, by --weight_check; the median of --repeats counts.
"""

import argparse
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from benchmarks.cases import Benchmark, Row, Setup, extra_bytes, main, seconds
from lightrft.config import Config
from lightrft.config.arguments import WeightCheck
from lightrft.models.lora import sent_weights
from lightrft.strategy.roles import hf_model_of
from lightrft.strategy.utils.broadcast_utils import BroadcastManager

MIB, GIB = 2**20, 2**30


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weight_bucket_mib",
        type=int,
        nargs="+",
        default=[512],
        help="the first is everything's; update is timed by all",
    )


def configure(config: Config, args: argparse.Namespace) -> Config:
    bucket_bytes = args.weight_bucket_mib[0] * MIB
    return replace(
        config,
        data=replace(config.data, prompt_max_len=512),
        rollout=replace(config.rollout, weight_bucket_bytes=bucket_bytes, generate_max_len=512),
    )


def measure(setup: Setup, args: argparse.Namespace) -> Row:
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

    bucket_bytes = strategy.config.rollout.weight_bucket_bytes

    def sync(check: WeightCheck) -> float:
        manager = BroadcastManager(setup.engine, strategy.collectives, strategy.device, bucket_bytes, check)

        @torch.no_grad()
        def once() -> None:
            buckets = partial(strategy.weight_buckets, weights, strategy.engine_dtype)
            manager.broadcast_to_engine(specs, buckets, next(versions))

        return seconds(strategy, once, args.repeats)

    def update() -> None:
        # With what the strategy does around a sync, as the trainer calls it.
        strategy.update_engine_weights(actor)

    row: Row = {"GiB": num_bytes / GIB, "gather s": seconds(strategy, gather, args.repeats)}
    row |= {"sync off s": sync("off"), "sync sample s": sync("sample"), "sync full s": sync("full")}
    whole = seconds(strategy, update, args.repeats)
    extra = extra_bytes(strategy.device, update)
    most = 2 * max(bucket_bytes, *(spec.num_bytes for spec in specs))
    row |= {
        "update_engine_weights s": whole,
        "GB/s": num_bytes / 1e9 / whole,
        "extra MiB": None if extra is None else extra / MIB,
        "limit MiB": most / MIB,
    }
    for mib in args.weight_bucket_mib[1:]:
        with_buckets_of(setup, mib * MIB)
        row[f"update of {mib} MiB s"] = seconds(strategy, update, args.repeats)
    with_buckets_of(setup, bucket_bytes)
    return row


def with_buckets_of(setup: Setup, num_bytes: int) -> None:
    strategy = setup.strategy
    rollout = replace(strategy.config.rollout, weight_bucket_bytes=num_bytes)
    strategy.config = replace(strategy.config, rollout=rollout)
    strategy.use_engine(setup.engine)


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


BENCHMARK = Benchmark("Weight sync", add_flags, configure, measure)

if __name__ == "__main__":
    main("benchmarks.weight_sync", [BENCHMARK])
