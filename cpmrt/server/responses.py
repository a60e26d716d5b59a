"""Responses: JSON, or server-sent events sent as they come."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cpmrt.server.answers import compact_json, event, to_bytes
from cpmrt.server.engine_thread import Item
from cpmrt.server.errors import ApiError, as_api_error
from cpmrt.server.exchange import Exchange
from cpmrt.server.json_body import ClientGoneError
from cpmrt.server.messages_answer import messages_error, messages_error_event
from cpmrt.server.service import Prepared
from cpmrt.server.telemetry import RequestRecord, record_of

_log = logging.getLogger("cpmrt.server")
_FIRST_WAIT_S = 1.0
"""How long to wait for the first token before the status is sent: until then an error can have its own status."""
_MESSAGES = "/v1/messages"
_PART_BYTES = 256 * 1024
CLIENT_GONE = 499


class JsonResponse(Response):
    """A response that is a JSON object in UTF-8."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_bytes(compact_json(content))


def error_response(error: ApiError, path: str) -> JsonResponse:
    """Return the response for an error of a request to `path`, in the shape of that API."""
    body = messages_error(error) if path.startswith(_MESSAGES) else error.body()
    return JsonResponse(body, error.status, error.headers)


def error_event(error: ApiError, path: str) -> str:
    """Return the event that ends a stream which `path` has begun."""
    if path.startswith(_MESSAGES):
        return messages_error_event(error)
    return event(error.body())


async def whole_answer(prepared: Prepared, exchange: Exchange) -> Response:
    """Answer with everything at once. Raises ApiError, ClientGoneError."""
    async with exchange:
        while not exchange.is_done:
            for item in await exchange.items():
                prepared.format.add(item)
    return await written(prepared, exchange.usage())


async def written(prepared: Prepared, usage: dict[str, Any]) -> Response:
    """Return the response for an answer that is complete."""
    parts = _Parts()
    for piece in prepared.format.whole(usage):
        parts.add(piece)
        await asyncio.sleep(0)  # however long the answer is, others are served while it is written
    return LongJsonResponse(parts)


class _Parts(list[bytearray]):
    """Text as UTF-8, in parts that are quickly sent."""

    def add(self, text: str) -> None:
        if not self or len(self[-1]) >= _PART_BYTES:
            self.append(bytearray())
        self[-1] += to_bytes(text)


def json_parts(content: Any) -> Sequence[bytearray]:
    """Return the JSON of an object of any size. For a worker thread: other threads can run between its values."""
    parts = _Parts()
    for text in json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).iterencode(content):
        parts.add(text)
    return parts


class LongJsonResponse(Response):
    """A response of JSON text in parts, each of which is sent when the client has taken most of those before."""

    def __init__(self, parts: Sequence[bytes | bytearray]):
        length = str(sum(map(len, parts)))
        super().__init__(media_type="application/json", headers={"content-length": length})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(Response):
    """Sends the chunks of an answer as soon as they are there; those that came meanwhile go out together."""

    def __init__(self, prepared: Prepared, exchange: Exchange):
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._format, self._exchange = prepared.format, exchange
        self._is_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._exchange:
            await self._exchange.wait_first(_FIRST_WAIT_S)
            try:
                events = await self._first_events()
            except ApiError as error:
                return await error_response(error, scope["path"])(scope, receive, send)
            except ClientGoneError:
                record_of(scope).status = CLIENT_GONE
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # A task of its own and the server's own `send`: a token passes none of the application's layers.
            tail = await asyncio.create_task(self._send_events(record_of(scope), events))
            await send({"type": "http.response.body", "body": to_bytes(tail), "more_body": False})

    async def _send_events(self, record: RequestRecord, events: str) -> str:
        """Send all events but the last, which is returned. The status has been sent: an error becomes an event."""
        exchange, send = self._exchange, record.send
        try:
            while True:
                if events:
                    await send({"type": "http.response.body", "body": to_bytes(events), "more_body": True})
                if exchange.is_done:
                    return self._format.end(exchange.usage())
                events = self._events(await exchange.items())
        except ApiError as error:
            record.status = error.status
            return self._format.failed(error)
        except ClientGoneError:
            record.status = CLIENT_GONE
            return ""
        except Exception as error:
            _log.exception("an answer cannot go on")
            refusal = as_api_error(error)
            record.status = refusal.status
            return self._format.failed(refusal)

    async def _first_events(self) -> str:
        return self._events(await self._exchange.items() if self._exchange.has_items else [])

    def _events(self, items: list[Item]) -> str:
        """Return the events of items, or a sign of life. Those at the beginning wait for the scores of the prompts."""
        stream = self._format.stream
        if self._is_begun or not self._exchange.is_begun:
            return "".join([stream(item) for item in items]) if items else self._format.ping
        self._is_begun = True
        return self._format.begin() + "".join([stream(item) for item in items])
