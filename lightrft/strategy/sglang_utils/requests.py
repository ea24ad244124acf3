"""Requests: what SGLang is asked for one response, and what becomes of its answer."""

import math
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.strategy.sglang_utils.library import Response
from lightrft.strategy.sglang_utils.scheduler import SUPPRESSED
from lightrft.types import GenerationOutput, PromptExample, SamplingParams

_LARGEST_SEED = 2**63 - 1


def request_params(params: SamplingParams, seed: int) -> dict[str, Any]:
    """Fields of `sglang.SamplingParams` for one response; nothing is left to SGLang's or the model's defaults."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        # -1 keeps the whole vocabulary.
        "top_k": params.top_k or -1,
        "min_p": 0.0,
        # It travels as a signed number.
        "sampling_seed": seed & _LARGEST_SEED,
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": 0,
        # Would ignore these ids too. The model's own end tokens are not in the configuration that SGLang gets.
        "ignore_eos": not params.stop_token_ids,
        "stop_token_ids": list(params.stop_token_ids),
        "stop": list(params.stop),
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "custom_params": {SUPPRESSED: list(params.suppressed_ids)} if params.suppressed_ids else None,
    }


def scores(params: SamplingParams) -> bool:
    """Whether SGLang's log-probs are at the temperature: it takes top_k 1 for greedy, and scores that at 1."""
    return params.top_k != 1 or params.temperature in (0.0, 1.0)


def output(
    response: Response,
    prompt: PromptExample,
    params: SamplingParams,
    tokenizer: PreTrainedTokenizerBase | None,
    version: int,
) -> GenerationOutput:
    """Of what SGLang answered.

    Where a response ends is found out here: SGLang calls one that stops on its last allowed token truncated, and looks
    for a stop string in no more tokens than its tokenizer would write it with.

    Raises:
        RuntimeError: It answers another prompt than the actor will score; it ended for another reason; or its
            log-probs are no numbers.
    """
    where = f"row {prompt.row}"
    if response.num_prompt_tokens != len(prompt.prompt_ids):
        raise RuntimeError(
            "SGLang must see the prompt that the actor sees: "
            f"{where} has {len(prompt.prompt_ids)} tokens, and SGLang counts {response.num_prompt_tokens}."
        )
    ids, reason = list(response.ids), response.finish_reason
    end = end_of_response(ids, params, tokenizer)
    if end is None and (reason != "length" or len(ids) != params.max_new_tokens):
        raise RuntimeError(f"SGLang ended a response after {len(ids)} tokens for the reason {reason}, at {where}.")
    kept = None if response.log_probs is None else list(response.log_probs[:end])
    # A sum is NaN where a part of it is; a few millions of them take a while one by one.
    if kept is not None and math.isnan(sum(kept)) and any(math.isnan(value) for value in kept):
        raise RuntimeError(f"weights of version {version} give logits that are NaN, at {where}.")
    return GenerationOutput(ids[:end], "length" if end is None else "stop", kept, version)


def end_of_response(
    ids: Sequence[int], params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None
) -> int | None:
    """Number of tokens up to the first that ends the response, or None."""
    end = min((ids.index(token) + 1 for token in params.stop_token_ids if token in ids), default=None)
    if not params.stop:
        return end
    assert tokenizer is not None
    string_end = _end_of_string(ids[:end], params.stop, tokenizer)
    return end if string_end is None else string_end


def _end_of_string(ids: Sequence[int], strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Number of tokens with which a string is first complete, or None."""

    def holds(count: int) -> bool:
        text = tokenizer.decode(list(ids[:count]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in strings)

    if not holds(len(ids)):
        return None
    # The last token is the usual one.
    low, high = 0, len(ids)
    middle = high - 1
    while high - low > 1:
        if holds(middle):
            high = middle
        else:
            low = middle
        middle = (low + high) // 2
    return high
