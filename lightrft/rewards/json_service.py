"""JSONService: answers of HTTP servers to requests in JSON, asked again where that can help."""

import asyncio
import itertools
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeAlias, TypeVar

import httpx
from tenacity import (
    AsyncRetrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_chain,
    wait_exponential,
    wait_none,
    wait_random,
)
from tenacity.wait import wait_base

Body: TypeAlias = Mapping[str, Any]
Answer = TypeVar("Answer")

LONGEST_WAIT_SECONDS = 30.0
CONNECTIONS_OF_CLIENT = 32
"""httpx looks through all connections of a client for each of its requests, which takes longer than they do."""
GIVEN_UP_IN_A_ROW = 3
"""Requests without an answer in between, after which a server that has answered before is taken for dead."""
QUOTED_CHARACTERS = 500
"""Of a server's own words, in an error."""


class ServiceError(RuntimeError):
    """A server did not give what was asked of it; the message has its URL."""


class PassingError(ServiceError):
    """A failure that may be over soon: no connection, no answer in time, 429 or 5xx."""


@dataclass
class Clients:
    """What sends the requests of one call, and how they fare."""

    clients: Sequence[httpx.AsyncClient]
    slots: asyncio.Semaphore
    """One for each request under way."""
    has_answers: bool = False
    num_given_up: int = 0
    """Requests since the last answer of which all tries failed."""
    given_up: ServiceError | None = None
    """What came of the last one of them."""

    @property
    def is_in_vain(self) -> bool:
        """Whether nobody is there (any more): each of thousands of requests would wait for all its tries."""
        return self.num_given_up >= (GIVEN_UP_IN_A_ROW if self.has_answers else 1)


class JSONService:
    """Servers that answer alike, asked in turn; a request that failed for a passing reason goes to the next one.

    A failure is never an answer: it is raised, or stands in the answer's place as the ServiceError that it is.

    Args:
        urls: Where to post.
        api_key: Sent as a bearer token; it is in no message.
        timeout_seconds: Of one try, from the connection to the last byte.
        tries: For each request.
        backoff_seconds: Wait before the second try, which another server gets at once; each later one waits twice as
            long, and a random part.
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
        self._urls = list(urls)
        self._turns = itertools.count()
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
        try:
            async with self._clients(len(bodies)) as clients, asyncio.TaskGroup() as group:
                posts = (self._post(clients, body, index, read) for index, body in enumerate(bodies))
                tasks = [group.create_task(post) for post in posts]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def post_each(
        self, bodies: Sequence[Body], read: Callable[[int, Any], Answer]
    ) -> list[Answer | ServiceError]:
        """One answer for each body, in order, or the error of a request that failed for good; `read` as above."""

        async def answer_or_error(clients: Clients, index: int) -> Answer | ServiceError:
            try:
                return await self._post(clients, bodies[index], index, read)
            except ServiceError as error:
                return error

        async with self._clients(len(bodies)) as clients, asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer_or_error(clients, index)) for index in range(len(bodies))]
        return [task.result() for task in tasks]

    @asynccontextmanager
    async def _clients(self, num_requests: int) -> AsyncIterator[Clients]:
        """Connections for the requests of one call: servers close those that are idle, and steps take longer."""
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        count = math.ceil(min(num_requests, self.max_requests) / CONNECTIONS_OF_CLIENT)
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    httpx.AsyncClient(headers=headers, timeout=None, limits=httpx.Limits(), verify=self._ssl_context)
                )
                for _ in range(count)
            ]
            yield Clients(clients, asyncio.Semaphore(self.max_requests))

    async def _post(
        self,
        clients: Clients,
        body: Body,
        index: int,
        read: Callable[[int, Any], Answer],
    ) -> Answer:
        turn = next(self._turns) % len(self._urls)
        urls = itertools.cycle([*self._urls[turn:], *self._urls[:turn]])
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(PassingError),
            stop=stop_after_attempt(self.tries),
            wait=self._wait(),
            reraise=True,
        )
        # A request that waits for its next try keeps its slot: a server in trouble gets less to do.
        async with clients.slots:
            if clients.is_in_vain:
                raise ServiceError(f"{clients.given_up} Nothing was answered meanwhile: this request was not sent.")
            client = clients.clients[index % len(clients.clients)]
            try:
                url, response = await retrying(self._try, client, body, urls)
            except PassingError as error:
                clients.given_up = ServiceError(f"{error} This was try {self.tries} of {self.tries}.")
                clients.num_given_up += 1
                raise clients.given_up from error
            clients.has_answers, clients.num_given_up = True, 0
        try:
            answer = response.json()
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"{url} answered with no JSON: {self._quoted(response)}.") from error
        try:
            return read(index, answer)
        except ValueError as error:
            reason = self._without_key(str(error))
            raise ServiceError(
                f"{url} gave an answer that cannot be used: {reason} It was {self._quoted(response)}."
            ) from error

    def _wait(self) -> wait_base:
        first = self.backoff_seconds
        growing = wait_exponential(multiplier=first, max=LONGEST_WAIT_SECONDS) + wait_random(0, first)
        # One server's failure says little of the next one.
        return growing if len(self._urls) == 1 else wait_chain(wait_none(), growing)

    async def _try(self, client: httpx.AsyncClient, body: Body, urls: Iterator[str]) -> tuple[str, httpx.Response]:
        """The URL that was asked, and what it answered with 200."""
        url = next(urls)
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
        return url, response

    def _check_status(self, url: str, response: httpx.Response) -> None:
        status = response.status_code
        if status == HTTPStatus.OK:
            return
        message = f"{url} answered with {status} {response.reason_phrase}: {self._quoted(response)}."
        if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise PassingError(message)
        raise ServiceError(message)

    def _quoted(self, response: httpx.Response) -> str:
        return repr(self._without_key(response.text)[:QUOTED_CHARACTERS])

    def _without_key(self, text: str) -> str:
        return text if self._api_key is None else text.replace(self._api_key, "***")


def api_key_of(variable: str) -> str | None:
    """The secret in a variable of the environment, or None.

    Raises:
        ValueError: It cannot be sent; the message does not show it.
    """
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{variable} must hold printable ASCII characters: it holds others. Set it again.")
    return key or None
