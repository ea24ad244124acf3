"""RemoteTeacher: a teacher's log-probs from servers, computed while the models run."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightrft.config import ModelConfig
from lightrft.config.arguments import TeacherAPI
from lightrft.config.sources import server_urls
from lightrft.rewards.json_service import Body, JSONService, ServiceError, api_key_of
from lightrft.rewards.worker import RewardWorker
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.types import Experience

API_KEY = "LIGHTRFT_TEACHER_API_KEY"
LOWEST_LOG_PROB = -9999.0
"""vLLM's stand-in for minus infinity, which JSON lacks."""
ROUNDING = 1e-3
"""Log-probs that come out above 0 by no more than this are rounded, not logits."""


@dataclass(frozen=True)
class Text:
    """Token ids to score, of which those from `start` on are the response."""

    ids: list[int]
    start: int


@dataclass(frozen=True)
class Protocol:
    """How servers of one kind are asked for the log-probs of a text's own tokens, at temperature 1."""

    path: str
    body: Callable[[Text], Body]
    read: Callable[[Any, Text], list[float]]
    """Log-probs of the response in the server's JSON; raises ValueError where they are not those of the text."""


class RemoteTeacher:
    """Asks the servers in a thread of its own, and raises their errors on all ranks alike."""

    def __init__(self, strategy: StrategyBase, options: ModelConfig) -> None:
        self.strategy = strategy
        self.protocol = PROTOCOLS[options.teacher_api]
        self.service = teacher_service(options)
        self._worker: RewardWorker[list[list[float]]] = RewardWorker()
        self._pending: Future[list[list[float]]] | None = None

    def submit(self, samples: Sequence[Experience]) -> None:
        """Starts to score `samples`; `result` waits for it."""
        assert self._pending is None, "the result of an earlier submission was not taken"
        texts = [Text(sample.input_ids.tolist(), sample.response_start) for sample in samples]
        self._pending = self._worker.submit(partial(scores, self.service, self.protocol, texts))

    def result(self) -> list[Tensor]:
        """Log-probs `(L,)` of the submitted samples, in their order. Every rank must call it.

        Raises:
            PhaseError: A server failed some rank for good; the message holds that rank's traceback, with the URL.
        """
        pending, self._pending = self._pending, None
        assert pending is not None, "submit comes first"
        log_probs: list[list[float]] = []
        with self.strategy.collectives.collect("teacher"):
            log_probs = pending.result()
        return [torch.tensor(values, dtype=torch.float32) for values in log_probs]


def check_remote_teacher(options: ModelConfig, last_id: int) -> None:
    """Asks each server once for the log-prob of the last token id that the actor may draw.

    Raises:
        ValueError: One of them does not give it.
    """
    texts = [Text([last_id, last_id], 1)]
    # A thread of its own: a notebook's already runs a loop.
    worker: RewardWorker[list[list[float]]] = RewardWorker()
    assert options.teacher_url is not None
    for url in server_urls(options.teacher_url):
        service = teacher_service(replace(options, teacher_url=url), tries=2)
        try:
            worker.submit(partial(scores, service, PROTOCOLS[options.teacher_api], texts)).result()
        except ServiceError as error:
            raise ValueError(
                "every server of teacher_url must give log-probs of the actor's tokens, of which "
                f"{last_id} is the last: {error} Start it, or correct --teacher_url, --teacher_api or {API_KEY}."
            ) from error


def teacher_service(options: ModelConfig, tries: int = 5) -> JSONService:
    """The servers of --teacher_url, with the key that the environment has for them."""
    assert options.teacher_url is not None
    path = PROTOCOLS[options.teacher_api].path
    urls = [url + path for url in server_urls(options.teacher_url)]
    return JSONService(urls, api_key_of(API_KEY), options.teacher_timeout_seconds, tries)


def scores(
    service: JSONService, protocol: Protocol, texts: Sequence[Text], runner: asyncio.Runner
) -> list[list[float]]:
    """Log-probs of each text's response."""

    def read(index: int, answer: Any) -> list[float]:
        return protocol.read(answer, texts[index])

    return runner.run(service.post_all([protocol.body(text) for text in texts], read))


# Protocols


def openai_body(text: Text) -> Body:
    """For vLLM's `/v1/completions`: `prompt_logprobs` 0 asks for those of the prompt's own tokens alone."""
    return {"prompt": text.ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}


def read_openai(answer: Any, text: Text) -> list[float]:
    match answer:
        case {"choices": [{"prompt_logprobs": [*entries]}]}:
            return own_log_probs(entries, text, 0, openai_value)
    raise ValueError("one choice with prompt_logprobs must be in it. vLLM's server gives them, not every other one.")


def openai_value(entry: Any, token_id: int) -> Any:
    """Of the candidates of a position, by their ids, the token itself."""
    candidate = entry.get(str(token_id)) if isinstance(entry, dict) else None
    if not isinstance(candidate, dict):
        raise other_token(entry, token_id)
    return candidate.get("logprob")


def sglang_body(text: Text) -> Body:
    """For SGLang's `/generate`: the entry at `logprob_start_len` has no log-prob yet."""
    return {
        "input_ids": text.ids,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": text.start - 1,
    }


def read_sglang(answer: Any, text: Text) -> list[float]:
    match answer:
        case {"meta_info": {"input_token_logprobs": [*entries]}}:
            return own_log_probs(entries, text, text.start - 1, sglang_value)
    raise ValueError("meta_info with input_token_logprobs must be in it.")


def sglang_value(entry: Any, token_id: int) -> Any:
    """Of (log-prob, id, text); SGLang writes 0 for the ids at the end of its vocabulary."""
    match entry:
        case [value, shown, *_] if shown in (token_id, 0):
            return value
    raise other_token(entry, token_id)


def own_log_probs(entries: Sequence[Any], text: Text, first: int, value_of: Callable[[Any, int], Any]) -> list[float]:
    """Log-probs of the response, from one entry for each token from `first` on, which itself has none."""
    if len(entries) != len(text.ids) - first:
        raise ValueError(f"one entry must be there for each of {len(text.ids) - first} tokens: it has {len(entries)}.")
    tokens = zip(entries[1:], text.ids[first + 1 :], strict=True)
    values = [value_of(entry, token_id) for entry, token_id in tokens]
    return [checked(value) for value in values[text.start - first - 1 :]]


def checked(value: Any) -> float:
    # Comparisons, so that NaN and integers too large for a float fail as well.
    if not isinstance(value, int | float) or isinstance(value, bool) or not LOWEST_LOG_PROB < value <= ROUNDING:
        raise ValueError(f"log-probs must be finite numbers that are at most 0: {value!s:.100}.")
    return float(value)


def other_token(entry: Any, token_id: int) -> ValueError:
    return ValueError(f"entries must be of the tokens that were sent: {entry!s:.100} for token {token_id}.")


PROTOCOLS: dict[TeacherAPI, Protocol] = {
    "openai": Protocol("/v1/completions", openai_body, read_openai),
    "sglang": Protocol("/generate", sglang_body, read_sglang),
}
