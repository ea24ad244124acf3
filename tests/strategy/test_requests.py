"""What engines of other packages are asked for."""

from dataclasses import replace

import pytest

from lightrft.strategy.utils.requests import check_requests
from lightrft.strategy.vllm_utils.vllm_engine import request_params
from lightrft.types import PromptExample, SamplingParams

PARAMS = SamplingParams(max_new_tokens=6)


def test_what_stands_for_an_item_counts_as_the_tokens_that_are_made_of_it() -> None:
    """10 tokens for an image, which is one before it is expanded: 14 + 6 do not fit into 19."""
    prompt = PromptExample(0, "", prompt_ids=[5] * 2 + [9] * 10 + [5] * 2)
    check_requests([prompt], PARAMS, max_model_len=20, takes_stop_strings=False)
    with pytest.raises(ValueError, match=r"14 \+ 6 tokens, context 19"):
        check_requests([prompt], PARAMS, max_model_len=19, takes_stop_strings=False)


def test_stop_strings_need_an_engine_that_was_built_for_them() -> None:
    with pytest.raises(ValueError, match="set --stop"):
        check_requests([], replace(PARAMS, stop=("end",)), max_model_len=20, takes_stop_strings=False)


def test_nothing_of_a_request_to_vllm_is_left_to_the_models_own_settings() -> None:
    """A key of 64 bits loses its highest, which would be a sign; biases would not reach probability 0."""
    asked = request_params(replace(PARAMS, suppressed_ids=(3,), stop_token_ids=(1, 7)), 2**64 - 1)
    assert asked["seed"] == 2**63 - 1
    assert (asked["ignore_eos"], asked["stop_token_ids"], asked["skip_special_tokens"]) == (True, [1, 7], False)
    assert "logit_bias" not in asked
