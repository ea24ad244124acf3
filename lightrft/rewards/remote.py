"""Remote rewards: servers of `--remote_rm_url`, asked by the protocol that docs/rewards.md shows."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from lightrft.config.arguments import Config
from lightrft.config.sources import server_urls
from lightrft.rewards.json_service import JSONService, ServiceError, api_key_of
from lightrft.rewards.judge import judge_source
from lightrft.rewards.records import Fault, Grade, RewardInput, RewardSource
from lightrft.rewards.remote_protocol import body_of, read_grades

API_KEY = "LIGHTRFT_REWARD_API_KEY"
START_SECONDS = 30.0
"""A server that is busy with another run says something within it."""


class RemoteRewardSource:
    """Grades of servers, several rows a request; a request that fails for good costs its own rows alone.

    Args:
        batch_size: Rows of a request at most.
    """

    name = "remote_rm"

    def __init__(self, service: JSONService, batch_size: int) -> None:
        self.service = service
        self.batch_size = batch_size

    def check_row(self, sample: RewardInput) -> None:
        body_of([sample])

    def grade(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Grade]:
        """One grade for each input, in order; what the servers did not give is an error with the URL.

        Raises:
            ValueError: A label or reference is nothing that JSON has a form for.
        """
        starts = range(0, len(inputs), self.batch_size)
        batches = [inputs[start : start + self.batch_size] for start in starts]

        def read(index: int, answer: Any) -> list[Grade]:
            return read_grades(answer, len(batches[index]))

        answers = runner.run(self.service.post_each([body_of(batch) for batch in batches], read))
        grades: list[Grade] = []
        for batch, answer in zip(batches, answers, strict=True):
            if isinstance(answer, ServiceError):
                grades += [Grade(None, fault=Fault("error", str(answer)))] * len(batch)
            else:
                grades += answer
        return grades


def remote_sources(config: Config) -> list[RewardSource]:
    """The components of the reward that servers give: `remote_rm` and `judge`, where the flags name servers.

    Raises:
        ValueError: The key that the environment has for one cannot be sent.
    """
    options = config.reward
    sources: list[RewardSource] = []
    if options.remote_rm_url is not None:
        urls, key = server_urls(options.remote_rm_url), api_key_of(API_KEY)
        service = JSONService(urls, key, options.remote_rm_timeout_seconds, max_requests=options.reward_requests)
        sources.append(RemoteRewardSource(service, options.remote_rm_batch_size))
    if options.judge_url is not None:
        sources.append(judge_source(options))
    return sources


def check_reward_servers(config: Config) -> None:
    """Looks whether each server of the flags is there; what it says to a GET does not matter.

    Raises:
        ValueError: One is not.
    """
    options = config.reward
    flags = {"remote_rm_url": options.remote_rm_url, "judge_url": options.judge_url}
    for flag, text in flags.items():
        for url in [] if text is None else server_urls(text):
            try:
                # Its reply may never end.
                with httpx.stream("GET", url, timeout=START_SECONDS):
                    pass
            except httpx.TransportError as error:
                raise ValueError(
                    f"every server of {flag} must be there: {url} could not be reached: {error!r}. "
                    f"Start it, or correct --{flag}."
                ) from error
