"""The body of a request: read within limits of size and time, parsed within limits of depth and numbers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from cpmrt.server.errors import ApiError

MAX_DEPTH = 64
BODY_TIMEOUT_S = 30.0

Receive = Callable[[], Awaitable[Any]]


class ClientGoneError(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive, content_length: str | None, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError 413 or 408, ClientGoneError."""
    if content_length is not None and content_length.isdecimal() and int(content_length[:20]) > max_bytes:
        raise _too_large(max_bytes)
    try:
        return await asyncio.wait_for(_read(receive, max_bytes), BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise ApiError(408, message, code="timeout", headers={"Connection": "close"}) from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises ApiError 400: not UTF-8, not JSON, NaN, a number too long, too deep, no object."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        _check_depth(value)
    except UnicodeDecodeError as error:
        raise _malformed(f"it is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _malformed(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise _malformed(str(error)[:200]) from None
    if not isinstance(value, dict):
        raise _malformed("it is not an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
        level = [item for item in deeper if isinstance(item, (dict, list))]
        if not level:
            return
    raise RecursionError


def _malformed(problem: str) -> ApiError:
    return ApiError(400, f"the body is not a valid JSON request: {problem}", code="invalid_json")
