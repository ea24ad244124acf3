"""Requests: what an engine of another package can be asked for."""

from collections.abc import Sequence

from lightrft.types import PromptExample, SamplingParams


def check_requests(
    prompts: Sequence[PromptExample],
    params: SamplingParams,
    *,
    max_model_len: int,
    takes_stop_strings: bool,
) -> None:
    """Raises where the engine would fail, or quietly shorten a response.

    What stands for media counts with as many tokens as the engine makes of it.

    Args:
        max_model_len: Tokens of prompt and response at most.
        takes_stop_strings: Whether it was built for `SamplingParams.stop`.

    Raises:
        ValueError: There are stop strings that it cannot take, or a prompt and its response do not fit.
    """
    if params.stop and not takes_stop_strings:
        raise ValueError("stop strings need an engine that was built for them: set --stop.")
    longest = max((len(prompt.prompt_ids) for prompt in prompts), default=0)
    if longest + params.max_new_tokens > max_model_len:
        raise ValueError(
            f"prompt and response must fit into the engine's context: {longest} + {params.max_new_tokens} tokens, "
            f"context {max_model_len}. Raise --prompt_max_len or --generate_max_len."
        )
