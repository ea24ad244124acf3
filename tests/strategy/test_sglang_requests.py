"""What SGLang is asked for, and what becomes of its answer."""

import math
from array import array
from dataclasses import replace

import pytest

from lightrft.strategy.sglang_utils.library import Response
from lightrft.strategy.sglang_utils.requests import end_of_response, output, request_params, scores
from lightrft.types import GenerationOutput, PromptExample, SamplingParams
from tests import tiny_models
from tests.tiny_models import CHARACTERS

PARAMS = SamplingParams(max_new_tokens=6)
TOKENIZER = tiny_models.tokenizer()
PROMPT = PromptExample(row=12, prompt="", prompt_ids=[4, 5, 6])


def answer(ids: list[int], finish_reason: str, log_prob: float = -1.0, num_prompt_tokens: int = 3) -> Response:
    return Response(array("q", ids), array("d", [log_prob] * len(ids)), finish_reason, num_prompt_tokens)


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def test_a_key_of_64_bits_travels_as_a_signed_number() -> None:
    assert request_params(PARAMS, 2**64 - 1)["sampling_seed"] == 2**63 - 1
    assert request_params(PARAMS, 2**63 + 5)["sampling_seed"] == 5


def test_nothing_ends_a_response_but_what_is_given() -> None:
    """`ignore_eos` would ignore the given ids as well."""
    free, stopping = request_params(PARAMS, 0), request_params(replace(PARAMS, stop_token_ids=(1, 7)), 0)
    assert (free["ignore_eos"], free["stop_token_ids"], free["top_k"]) == (True, [], -1)
    assert (stopping["ignore_eos"], stopping["stop_token_ids"]) == (False, [1, 7])
    assert request_params(replace(PARAMS, top_k=4), 0)["top_k"] == 4


@pytest.mark.parametrize(
    "change, given",
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"top_k": 2, "temperature": 0.7}, True),
        ({"top_k": 1}, True),
        ({"top_k": 1, "temperature": 0.0}, True),
        ({"top_k": 1, "temperature": 0.7}, False),
    ],
)
def test_log_probs_are_asked_for_where_they_are_at_the_temperature(change: dict, given: bool) -> None:
    """NUM-02."""
    assert scores(replace(PARAMS, **change)) is given


def test_a_response_that_stops_on_its_last_token_is_not_truncated() -> None:
    params = replace(PARAMS, stop_token_ids=(9,))
    stopped, cut = answer([3, 4, 5, 6, 7, 9], "length"), answer([3, 4, 5, 6, 7, 8], "length")
    expected = GenerationOutput([3, 4, 5, 6, 7, 9], "stop", [-1.0] * 6, 4)
    assert output(stopped, PROMPT, params, None, 4) == expected
    assert output(cut, PROMPT, params, None, 4).finish_reason == "length"


def test_a_string_that_sglang_overlooks_ends_the_response_where_it_is_complete() -> None:
    """It is complete with the third token: SGLang looks for it in as many as its own writing of the string has."""
    params = replace(PARAMS, stop=("ab", "2="))
    found = output(answer(ids("1ab+2="), "length", -0.5), PROMPT, params, TOKENIZER, 1)
    assert found == GenerationOutput(ids("1ab"), "stop", [-0.5] * 3, 1)


@pytest.mark.parametrize(
    "text, stops, strings, end",
    [
        ("1234", "", (), None),
        ("1234", "3", (), 3),
        ("1331", "3", (), 2),
        ("12=34", "", ("=3", "4"), 4),
        ("12=34", "2", ("=3",), 2),
        ("12=34", "4", ("=3",), 4),
        ("ababab", "", ("ba",), 3),
        ("ab", "", ("b",), 2),
    ],
)
def test_the_first_end_counts(text: str, stops: str, strings: tuple[str, ...], end: int | None) -> None:
    params = replace(PARAMS, stop_token_ids=tuple(ids(stops)), stop=strings)
    assert end_of_response(ids(text), params, TOKENIZER) == end


def test_an_end_for_no_reason_of_ours_is_an_error() -> None:
    for ended, reason in ((answer([3, 1], "stop"), "stop"), (answer([3, 1], "length"), "length")):
        with pytest.raises(RuntimeError, match=rf"after 2 tokens for the reason {reason}, at row 12\.$"):
            output(ended, PROMPT, PARAMS, None, 1)
    with pytest.raises(RuntimeError, match="for the reason abort"):
        output(answer([], "abort"), PROMPT, PARAMS, None, 1)


def test_log_probs_that_are_nan_name_the_weights() -> None:
    with pytest.raises(RuntimeError, match=r"weights of version 3 give logits that are NaN, at row 12\.$"):
        output(answer([2] * 6, "length", math.nan), PROMPT, PARAMS, None, 3)


def test_another_number_of_prompt_tokens_than_the_actor_s_is_an_error() -> None:
    """The prompt has 3 with its items expanded, and 2 without."""
    with pytest.raises(RuntimeError, match=r"row 12 has 3 tokens, and SGLang counts 2\.$"):
        output(answer([2] * 6, "length", num_prompt_tokens=2), PROMPT, PARAMS, None, 3)


def test_suppressed_ids_go_with_each_request() -> None:
    assert request_params(PARAMS, 0)["custom_params"] is None
    assert request_params(replace(PARAMS, suppressed_ids=(3, 9)), 0)["custom_params"] == {"suppressed_ids": [3, 9]}
