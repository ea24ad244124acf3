"""What SGLang is asked for, and what becomes of its answer."""

import math
from dataclasses import replace

import pytest

from lightrft.strategy.sglang_utils.requests import end_of_response, output, request_params, scores
from lightrft.types import GenerationOutput, SamplingParams
from tests import tiny_models
from tests.tiny_models import CHARACTERS

PARAMS = SamplingParams(max_new_tokens=6)
TOKENIZER = tiny_models.tokenizer()


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
    answer = ([3, 4, 5, 6, 7, 9], [-1.0] * 6, "length")
    assert output(answer, params, None, 4) == GenerationOutput([3, 4, 5, 6, 7, 9], "stop", [-1.0] * 6, 4)
    answer = ([3, 4, 5, 6, 7, 8], [-1.0] * 6, "length")
    assert output(answer, params, None, 4).finish_reason == "length"


def test_a_string_that_sglang_overlooks_ends_the_response_where_it_is_complete() -> None:
    """It is complete with the third token: SGLang looks for it in as many as its own writing of the string has."""
    params = replace(PARAMS, stop=("ab", "2="))
    answer = (ids("1ab+2="), [-0.5] * 6, "length")
    assert output(answer, params, TOKENIZER, 1) == GenerationOutput(ids("1ab"), "stop", [-0.5] * 3, 1)


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
    with pytest.raises(RuntimeError, match="after 2 tokens for the reason stop"):
        output(([3, 1], [-1.0, -1.0], "stop"), PARAMS, None, 1)
    with pytest.raises(RuntimeError, match="after 2 tokens for the reason length"):
        output(([3, 1], [-1.0, -1.0], "length"), PARAMS, None, 1)
    with pytest.raises(RuntimeError, match="for the reason abort"):
        output(([], [], "abort"), PARAMS, None, 1)


def test_log_probs_that_are_nan_name_the_weights() -> None:
    with pytest.raises(RuntimeError, match="weights of version 3 give logits that are NaN"):
        output(([2] * 6, [-1.0] * 5 + [math.nan], "length"), PARAMS, None, 3)
