"""The library: everything that is called of SGLang itself, in the host's process or in the scheduler's."""

import pickle
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lightrft.strategy.sglang_utils.draws import keyed_draws

Engine: TypeAlias = Any
"""`sglang.Engine`."""
SAMPLER = "lightrft"
"""Name under which SGLang's schedulers know our sampler."""
LOADER = "lightrft.strategy.sglang_utils.shard.serve"


# In the host's process


def start_engine(arguments: Mapping[str, Any]) -> Engine:
    """Starts the schedulers; returns when they have their memory.

    Args:
        arguments: Fields of `sglang.ServerArgs`.
    """
    from sglang.srt.entrypoints.engine import Engine  # pyright: ignore[reportMissingImports]

    class KeyedEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    return KeyedEngine(**arguments)


def describe(engine: Engine) -> dict[str, Any]:
    """Process ids, tokens that the KV cache holds, and bytes of it and of CUDA graphs on each device."""
    [state] = engine.loop.run_until_complete(engine.tokenizer_manager.get_internal_state())
    memory = state["memory_usage"]
    return {
        "pids": engine.get_all_child_pids(),
        "num_tokens": memory["token_capacity"],
        "kv_cache": int(memory["kvcache"] * 2**30),
        "cuda_graphs": int(memory["graph"] * 2**30),
    }


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[Mapping[str, Any]], is_scored: bool
) -> list[tuple[array, array | None, str]]:
    """Token ids, log-probs and the type of the finish reason of each response."""
    results = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=is_scored)
    return [_response(result, is_scored) for result in results]


def _response(result: Mapping[str, Any], is_scored: bool) -> tuple[array, array | None, str]:
    meta = result["meta_info"]
    scores = array("d", (value for value, _, _ in meta["output_token_logprobs"])) if is_scored else None
    return array("q", result["output_ids"]), scores, meta["finish_reason"]["type"]


def open_weights(engine: Engine, addresses: Sequence[str]) -> None:
    """Has each scheduler serve its weights at its address; returns when all ranks have hung up."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput  # pyright: ignore[reportMissingImports]

    payloads = [pickle.dumps([(address, torch.empty(0))]) for address in addresses]
    request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, load_format=LOADER, flush_cache=False)
    is_done, message = engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_tensor(request))
    if not is_done:
        raise RuntimeError(message)


def flush(engine: Engine) -> None:
    """Drops the KV cache of old weights."""
    if not engine.flush_cache().success:
        raise RuntimeError("SGLang has not dropped the cache of the old weights: requests are still running.")


def release(engine: Engine, tags: Sequence[str]) -> None:
    engine.release_memory_occupation(tags=list(tags))


def resume(engine: Engine, tags: Sequence[str]) -> None:
    engine.resume_memory_occupation(tags=list(tags))


# In a scheduler's process


def run_scheduler(*arguments: Any, **options: Any) -> None:
    """SGLang's own scheduler, whose requests draw by their keys.

    SGLang takes seeds only where `enable_deterministic_inference` replaces every matrix product with slower ones; and
    its draws by seed pick a token of any probability, zero as well, where the 32 bits of its noise are all set: once
    in 28,000 draws from 152,000 tokens.
    """
    from sglang.srt.layers.sampler import Sampler, register_sampler_backend  # pyright: ignore[reportMissingImports]
    from sglang.srt.managers.scheduler import run_scheduler_process  # pyright: ignore[reportMissingImports]
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    class KeyedSampler(Sampler):
        def _sample_from_probs(
            self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
        ) -> torch.Tensor:
            if sampling_info.sampling_seed is None:
                return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
            filters = () if simple_sampling_case else (sampling_info.top_ks, sampling_info.top_ps)
            return keyed_draws(probs, sampling_info.sampling_seed, positions, *filters)

    register_sampler_backend(SAMPLER, KeyedSampler)
    # The method is there to be overridden, says SGLang; plugins do it so.
    batch_info = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    HookRegistry.register(f"{batch_info}.adjusted_from_schedule_batch", keep_keys, HookType.AFTER)
    run_scheduler_process(*arguments, **options)


def keep_keys(result: None, batch_info: Any, batch: Any, vocab_size: int) -> None:
    """Puts the requests' keys where the sampler finds them, in the order of the batch; all have one, or none has."""
    keys = [request.sampling_params.sampling_seed for request in batch.reqs]
    if None in keys:
        return
    batch_info.sampling_seed = torch.tensor(keys, dtype=torch.int64).to(batch.device, non_blocking=True)
