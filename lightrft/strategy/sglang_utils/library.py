"""The library: everything that is called of SGLang itself, in the host's process or in the scheduler's."""

import pickle
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightrft.strategy.sglang_utils.draws import keyed_draws
from lightrft.strategy.sglang_utils.media import EngineInput, processor_output
from lightrft.strategy.sglang_utils.scheduler import audio_features, keep_params, without_suppressed
from lightrft.strategy.sglang_utils.shard import serve

Engine: TypeAlias = Any
"""`sglang.Engine`."""
SAMPLER = "pytorch"
"""The backend in whose place SGLang's schedulers take our sampler: on a CPU they take no other."""
LOADER = f"{__name__}.serve_weights"
"""Name by which SGLang imports it."""
Request: TypeAlias = tuple[int, Mapping[str, Any]]
"""The place of its prompt among the inputs, and fields of `sglang.SamplingParams`."""


@dataclass(frozen=True)
class Response:
    """What SGLang answers to one request."""

    ids: array
    log_probs: array | None
    finish_reason: str
    """Its type, in SGLang's words."""
    num_prompt_tokens: int
    """As SGLang counts them."""


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
    engine: Engine, inputs: Sequence[EngineInput], requests: Sequence[Request], is_scored: bool
) -> list[Response]:
    """The response to each request, with log-probs if they are scored."""
    media = [{kind: processor_output(packed) for kind, packed in each.media.items()} for each in inputs]

    def items(kind: str) -> list[list[dict[str, Any]]] | None:
        if not any(kind in each for each in media):
            return None
        return [[media[i][kind]] if kind in media[i] else [] for i, _ in requests]

    results = engine.generate(
        input_ids=[inputs[i].ids for i, _ in requests],
        sampling_params=[params for _, params in requests],
        return_logprob=is_scored,
        image_data=items("image"),
        video_data=items("video"),
        audio_data=items("audio"),
    )
    return [_response(result, is_scored) for result in results]


def _response(result: Mapping[str, Any], is_scored: bool) -> Response:
    meta = result["meta_info"]
    scores = array("d", (value for value, _, _ in meta["output_token_logprobs"])) if is_scored else None
    return Response(array("q", result["output_ids"]), scores, meta["finish_reason"]["type"], meta["prompt_tokens"])


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
    """SGLang's own scheduler, whose requests draw by their keys, and never a suppressed id.

    SGLang takes seeds only where `enable_deterministic_inference` replaces every matrix product with slower ones; and
    its draws by seed pick a token of any probability, zero as well, where the 32 bits of its noise are all set: once
    in 28,000 draws from 152,000 tokens. Its `logit_bias` is written id by id, and holds a number for every id.
    """
    from sglang.srt.layers.sampler import Sampler, register_sampler_backend  # pyright: ignore[reportMissingImports]
    from sglang.srt.managers.scheduler import run_scheduler_process  # pyright: ignore[reportMissingImports]
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pyright: ignore[reportMissingImports]

    class KeyedSampler(Sampler):
        def _preprocess_logits(self, logits: Tensor, sampling_info: Any) -> Tensor:
            logits = super()._preprocess_logits(logits, sampling_info)
            return without_suppressed(logits, sampling_info.custom_params)

        def _sample_from_probs(
            self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
        ) -> Tensor:
            if sampling_info.sampling_seed is None:
                return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
            filters = () if simple_sampling_case else (sampling_info.top_ks, sampling_info.top_ps)
            return keyed_draws(probs, sampling_info.sampling_seed, positions, *filters)

    register_sampler_backend(SAMPLER, KeyedSampler)
    # The method is there to be overridden, says SGLang; plugins do it so.
    batch_info = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
    HookRegistry.register(f"{batch_info}.adjusted_from_schedule_batch", keep_params, HookType.AFTER)
    run_scheduler_process(*arguments, **options)


def serve_weights(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang's custom weight loader: `shard.serve`, and what of the model the new weights make wrong."""
    from sglang.srt.managers import mm_utils  # pyright: ignore[reportMissingImports]

    if model.config.model_type == "qwen2_audio":
        model.get_audio_feature = MethodType(audio_features, model)
    serve(model, named_tensors)
    # SGLang's flush leaves what the old weights made of images.
    mm_utils.embedding_cache.clear()
