"""The HTTP server of `lightrft serve-rm`: what it answers."""

import hmac
import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from lightrft.cli.reward_rounds import Rounds, Served
from lightrft.rewards.records import RewardInput
from lightrft.rewards.remote_protocol import inputs_of, reply_of
from lightrft.utils.logging import get_logger

logger = get_logger(__name__)

PATH = "/get_reward"


def reward_app(served: Served, max_body_bytes: int, api_key: str | None = None) -> FastAPI:
    """The server.

    Args:
        api_key: Where there is one, requests must bring it as a bearer token.
    """
    app = FastAPI(title="lightrft serve-rm")
    rounds = Rounds(served)

    @app.get("/health")
    async def health() -> dict[str, str]:
        if served.trouble is not None:
            raise HTTPException(503, served.trouble)
        return {"status": "ok"}

    @app.post(PATH)
    @app.post("/")
    async def get_reward(request: Request) -> JSONResponse:
        check_key(request, api_key)
        inputs = await read_inputs(request, served, max_body_bytes)
        return JSONResponse(await reply(rounds, inputs))

    return app


def check_key(request: Request, api_key: str | None) -> None:
    sent = request.headers.get("Authorization", "")
    if api_key is not None and not hmac.compare_digest(sent.encode(), f"Bearer {api_key}".encode()):
        raise HTTPException(401, "the key is wrong or missing: send it as Authorization: Bearer KEY.")


async def read_inputs(request: Request, served: Served, max_body_bytes: int) -> list[RewardInput]:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_body_bytes:
            raise HTTPException(413, f"a request may have at most {max_body_bytes:,} bytes. Send fewer rows in one.")
    try:
        inputs = inputs_of(parsed(body))
        for sample in inputs:
            served.check_row(sample)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    return inputs


def parsed(body: bytes | bytearray) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body must be JSON: {error}.") from error


async def reply(rounds: Rounds, inputs: Sequence[RewardInput]) -> Any:
    """The reply, or 500 where a row has no reward for a failure of what grades: that never becomes a number."""
    try:
        grades = await rounds.grade(inputs)
    except Exception as error:
        logger.exception("a request of %d rows failed", len(inputs))
        raise HTTPException(500, f"{type(error).__name__}: {error}") from error
    for sample, grade in zip(inputs, grades, strict=True):
        if grade.fault is not None and grade.fault.kind == "error":
            logger.error("row %d: %s", sample.row, grade.fault.message)
            raise HTTPException(500, f"row {sample.row}: {first_and_last_line(grade.fault.message)}")
    return reply_of(grades)


def first_and_last_line(message: str) -> str:
    """What failed, and how: clients show the beginning of a reply, and a traceback ends with what matters."""
    first, *others = message.splitlines() or [""]
    return " ".join([first, *others[-1:]])
