"""Rollout: tokens per second through the strategy against the engine alone, and how far its log-probs are from HF's.

    python -m benchmarks.rollout --engine_types vllm sglang --sizes 0.5b 7b

adapter is `gather_and_generate`; bare is the same engine asked by its own interface, in turns in the same process.
mismatch is the mean absolute difference to the actor's log-probs, in nats, over --scored responses of each.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from benchmarks import bare_sglang_calls
from benchmarks.cases import Benchmark, Row, Setup, main, seconds
from lightrft.config import Config
from lightrft.models.collate import micro_batches
from lightrft.strategy.roles import hf_model_of
from lightrft.strategy.utils.distributed_util import plan_micro_batches
from lightrft.types import Experience, GenerationOutput, PromptExample, SamplingParams, Seeds

Outputs: TypeAlias = list[list[GenerationOutput]]

SCORED_TOKENS = 8192
"""Per forward of the actor."""
WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Way:
    """How responses are drawn, and, outside the time that it takes, made into outputs."""

    generate: Callable[[Sequence[PromptExample], SamplingParams, Seeds], Any]
    outputs: Callable[[Any], Outputs]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=64, help="of each rank")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=512)
    parser.add_argument("--scored", type=int, default=64, help="responses whose log-probs are compared")


def configure(config: Config, args: argparse.Namespace) -> Config:
    return replace(
        config,
        data=replace(config.data, prompt_max_len=args.prompt_tokens),
        rollout=replace(config.rollout, generate_max_len=args.new_tokens),
    )


def measure(setup: Setup, args: argparse.Namespace) -> Row:
    strategy = setup.strategy
    strategy.update_engine_weights(setup.actor)
    adapter = Way(strategy.gather_and_generate, lambda outputs: outputs)
    ways = {"bare": BARE[setup.engine_type](setup), "adapter": adapter}
    setup.engine.wake_up()
    prompts = make_prompts(setup, args)
    keys = count(1)
    drawn: dict[str, Any] = {}

    def draw(name: str, num_tokens: int) -> float:
        params = SamplingParams(max_new_tokens=num_tokens)
        seeds = [[next(keys) for _ in range(args.samples)] for _ in prompts]

        def once() -> None:
            drawn[name] = ways[name].generate(prompts, params, seeds)

        return seconds(strategy, once)

    for name in ways:
        # First uses compile.
        draw(name, min(WARM_UP_TOKENS, args.new_tokens))
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):
        # In turns, so that a slower or faster minute of the machine is both's.
        for name in ways:
            taken[name].append(draw(name, args.new_tokens))
    num_tokens = args.prompts * args.samples * args.new_tokens * strategy.world_size
    rates = {name: num_tokens / statistics.median(times) for name, times in taken.items()}
    row: Row = {f"{name} tokens/s": rate for name, rate in rates.items()}
    row["adapter / bare"] = rates["adapter"] / rates["bare"]
    if setup.computes:
        for name, way in ways.items():
            row[f"{name} mismatch"] = mismatch(setup, prompts, way.outputs(drawn[name]), args.scored)
    return row


def make_prompts(setup: Setup, args: argparse.Namespace) -> list[PromptExample]:
    vocab_size = hf_model_of(setup.actor).config.vocab_size
    numbers = torch.Generator().manual_seed(setup.strategy.rank)
    ids = torch.randint(2, vocab_size, (args.prompts, args.prompt_tokens), generator=numbers).tolist()
    return [PromptExample(row=i, prompt="", prompt_ids=one) for i, one in enumerate(ids)]


@torch.no_grad()
def mismatch(setup: Setup, prompts: Sequence[PromptExample], outputs: Outputs, num_scored: int) -> float:
    """Mean absolute difference in nats per token between the engine's log-probs and the actor's, over all ranks."""
    strategy = setup.strategy
    pairs = [(prompt, output) for prompt, group in zip(prompts, outputs, strict=True) for output in group]
    samples = [_sample(prompt, output) for prompt, output in pairs[:: max(1, len(pairs) // num_scored)]]
    plan = plan_micro_batches([s.num_tokens for s in samples], SCORED_TOKENS, 1, setup.layout == "padded")
    total, tokens = 0.0, 0
    for micro, _, _ in micro_batches(samples, plan, setup.layout, strategy.device):
        assert micro.rollout_log_probs is not None
        differences = (setup.actor(micro, 1.0).log_probs - micro.rollout_log_probs).abs()
        total, tokens = total + float(differences.double().sum()), tokens + len(differences)
    total, tokens = strategy.collectives.all_reduce_sum([total, tokens])
    return total / tokens


def _sample(prompt: PromptExample, output: GenerationOutput) -> Experience:
    ids = torch.tensor(prompt.prompt_ids + output.response_ids)
    return Experience(
        group=prompt.row,
        index=0,
        example=prompt,
        response="",
        input_ids=ids,
        position_ids=torch.arange(len(ids)),
        response_start=len(prompt.prompt_ids),
        action_mask=torch.ones(len(output.response_ids), dtype=torch.bool),
        finish_reason=output.finish_reason,
        rollout_log_probs=torch.tensor(output.log_probs),
    )


def bare_torch(setup: Setup) -> Way:
    return Way(setup.engine.engine.generate, lambda outputs: outputs)


def bare_vllm(setup: Setup) -> Way:
    """vLLM's own `generate`: n samples a prompt without seeds of their own, as its users call it."""
    import vllm  # type: ignore[import-not-found]

    engine: Any = setup.engine.engine
    group = setup.strategy.tp_group

    def generate(prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds) -> Any:
        sampling = vllm.SamplingParams(
            n=len(seeds[0]),
            temperature=params.temperature,
            max_tokens=params.max_new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )
        # Ranks of one model run the same requests, and must draw alike.
        torch.manual_seed(seeds[0][0])
        gathered = setup.strategy.collectives.all_gather_objects([prompt.prompt_ids for prompt in prompts], group)
        requests = [{"prompt_token_ids": ids} for own in gathered for ids in own]
        results = engine.llm.generate(requests, sampling, use_tqdm=False)
        start = sum(len(own) for own in gathered[: dist.get_rank(group)])
        return results[start : start + len(prompts)]

    def outputs(results: Any) -> list[list[GenerationOutput]]:
        return [[_output(completion) for completion in result.outputs] for result in results]

    return Way(generate, outputs)


def _output(completion: Any) -> GenerationOutput:
    log_probs = [next(iter(position.values())).logprob for position in completion.logprobs]
    return GenerationOutput(list(completion.token_ids), "length", log_probs, 0)


def bare_sglang(setup: Setup) -> Way:
    """SGLang's own `generate`, in its process: samples without seeds of their own, which its own sampler draws."""
    engine: Any = setup.engine.engine

    def generate(prompts: Sequence[PromptExample], params: SamplingParams, seeds: Seeds) -> tuple[int, list[int]]:
        """Where this rank's part of the results begins, and how many each of its prompts has."""
        own = [prompt.prompt_ids for prompt, keys in zip(prompts, seeds, strict=True) for _ in keys]
        gathered = engine.team.gather(own)
        sampling = {"temperature": params.temperature, "max_new_tokens": params.max_new_tokens, "ignore_eos": True}
        engine.team.led(lambda: engine.host.call(bare_sglang_calls.draw, list(chain(*gathered)), sampling))
        before = gathered[: dist.get_rank() % len(gathered)]
        return sum(len(part) for part in before), [len(keys) for keys in seeds]

    def outputs(part: tuple[int, list[int]]) -> list[list[GenerationOutput]]:
        start, counts = part
        results = iter(engine.team.led(lambda: engine.host.call(bare_sglang_calls.drawn))[start:])
        return [[GenerationOutput(*next(results), weight_version=0) for _ in range(count)] for count in counts]

    return Way(generate, outputs)


BARE: dict[str, Callable[[Setup], Way]] = {"torch": bare_torch, "vllm": bare_vllm, "sglang": bare_sglang}


BENCHMARK = Benchmark("Rollout", add_flags, configure, measure)

if __name__ == "__main__":
    main("benchmarks.rollout", [BENCHMARK])
