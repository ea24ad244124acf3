"""JSONService: answers of HTTP servers to requests in JSON, asked again where that can help."""

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_exponential, wait_random

Body: TypeAlias = Mapping[str, Any]
Answer = TypeVar("Answer")

LONGEST_WAIT_SECONDS = 30.0
QUOTED_CHARACTERS = 500
"""Of a server's own words, in an error."""


class ServiceError(RuntimeError):
    """A server did not give what was asked of it; the message has its URL."""


class PassingError(ServiceError):
    """A failure that may be over soon: no connection, no answer in time, 429 or 5xx."""


class JSONService:
    """Servers that answer alike, asked in turn; a request that failed for a passing reason goes to the next one.

    A failure is never an answer: requests are answered all, or the first that is not raises.

    Args:
        urls: Where to post.
        api_key: Sent as a bearer token; it is in no message.
        timeout_seconds: Of one try, from the connection to the last byte.
        tries: For each request.
        backoff_seconds: Wait before the second try; each later one waits twice as long, and a random part.
        max_requests: Sent at the same time at most.
    """

    def __init__(
        self,
        urls: Sequence[str],
        api_key: str | None = None,
        timeout_seconds: float = 120.0,
        tries: int = 5,
        backoff_seconds: float = 1.0,
        max_requests: int = 32,
    ) -> None:
        self._urls = itertools.cycle(urls)
        self._api_key = api_key
        # Reading the certificates takes longer than many an answer.
        self._ssl_context = httpx.create_ssl_context()
        self.timeout_seconds = timeout_seconds
        self.tries = tries
        self.backoff_seconds = backoff_seconds
        self.max_requests = max_requests

    async def post_all(self, bodies: Sequence[Body], read: Callable[[int, Any], Answer]) -> list[Answer]:
        """One answer for each body, in order.

        Args:
            read: Makes the answer of a body's index and the server's JSON; raises ValueError where that is no answer.

        Raises:
            ServiceError: Some request failed for good; the others are given up.
        """
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        slots = asyncio.Semaphore(self.max_requests)
        limits = httpx.Limits(max_connections=self.max_requests)
        # Connections last for these requests: servers close those that are idle for seconds, and steps take longer.
        client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, verify=self._ssl_context)
        try:
            async with client, asyncio.TaskGroup() as group:
                posts = (self._post(client, slots, body, index, read) for index, body in enumerate(bodies))
                tasks = [group.create_task(post) for post in posts]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _post(
        self,
        client: httpx.AsyncClient,
        slots: asyncio.Semaphore,
        body: Body,
        index: int,
        read: Callable[[int, Any], Answer],
    ) -> Answer:
        first = self.backoff_seconds
        wait = wait_exponential(multiplier=first, max=LONGEST_WAIT_SECONDS) + wait_random(0, first)
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(PassingError), stop=stop_after_attempt(self.tries), wait=wait, reraise=True
        )
        # A request that waits for its next try keeps its slot: a server in trouble gets less to do.
        async with slots:
            try:
                url, answer = await retrying(self._try, client, body)
            except PassingError as error:
                raise ServiceError(f"{error} This was try {self.tries} of {self.tries}.") from error
        try:
            return read(index, answer)
        except ValueError as error:
            raise ServiceError(f"{url} gave an answer that cannot be used: {error}") from error

    async def _try(self, client: httpx.AsyncClient, body: Body) -> tuple[str, Any]:
        """The URL that was asked, and its JSON."""
        url = next(self._urls)
        try:
            async with asyncio.timeout(self.timeout_seconds):
                response = await client.post(url, json=body)
        except TimeoutError as error:
            raise PassingError(f"{url} did not answer within {self.timeout_seconds:g} seconds.") from error
        except httpx.TransportError as error:
            raise PassingError(f"{url} could not be reached: {error!r}.") from error
        except httpx.RequestError as error:
            raise ServiceError(f"{url} gave no readable answer: {error!r}.") from error
        self._check_status(url, response)
        try:
            return url, response.json()
        except ValueError as error:
            raise ServiceError(f"{url} answered with no JSON: {self._quoted(response)}.") from error

    def _check_status(self, url: str, response: httpx.Response) -> None:
        status = response.status_code
        if status == HTTPStatus.OK:
            return
        message = f"{url} answered with {status} {response.reason_phrase}: {self._quoted(response)}."
        if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise PassingError(message)
        raise ServiceError(message)

    def _quoted(self, response: httpx.Response) -> str:
        text = response.text if self._api_key is None else response.text.replace(self._api_key, "***")
        return repr(text[:QUOTED_CHARACTERS])


def api_key_of(variable: str) -> str | None:
    """The secret in a variable of the environment, or None.

    Raises:
        ValueError: It cannot be sent; the message does not show it.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{variable} must hold printable ASCII characters: it holds others. Set it again.")
    return key or None
