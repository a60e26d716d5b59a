"""How answers leave: JSON, or server-sent events written as they come."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cpmrt.server.chunks import DONE, Chunks, event, to_bytes
from cpmrt.server.errors import ApiError
from cpmrt.server.exchange import Exchange
from cpmrt.server.json_body import ClientGoneError
from cpmrt.server.request_log import record_of
from cpmrt.server.service import Prepared

_FIRST_WAIT_S = 1.0
"""How long the status may wait for the first token. Until then an error can still be a status of its own."""
CLIENT_GONE = 499


class JsonResponse(Response):
    """A JSON object in UTF-8."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_bytes(json.dumps(content, ensure_ascii=False, separators=(",", ":")))


def error_response(error: ApiError) -> JsonResponse:
    """An error with its status."""
    return JsonResponse(error.body(), error.status, error.headers)


async def whole_answer(prepared: Prepared, exchange: Exchange) -> JsonResponse:
    """Everything at once. Raises ApiError, ClientGoneError."""
    async with exchange:
        while not exchange.is_done:
            for item in await exchange.items():
                prepared.answer.add(item)
    return JsonResponse({**prepared.head, "choices": prepared.answer.choices(), "usage": exchange.usage()})


class EventStream(Response):
    """The chunks of an answer, each as soon as it is there; those that came meanwhile go out together."""

    def __init__(self, prepared: Prepared, exchange: Exchange):
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._prepared, self._exchange = prepared, exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._exchange:
            await self._exchange.wait_first(_FIRST_WAIT_S)
            try:
                events = await self._first_events()
            except ApiError as error:
                return await error_response(error)(scope, receive, send)
            except ClientGoneError:
                record_of(scope).status = CLIENT_GONE
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                while True:
                    if events:
                        await send({"type": "http.response.body", "body": to_bytes(events), "more_body": True})
                    if self._exchange.is_done:
                        break
                    events = await self._next_events()
                tail = self._tail()
            except ApiError as error:
                tail = event(error.body())
                record_of(scope).status = error.status
            except ClientGoneError:
                record_of(scope).status = CLIENT_GONE
                tail = ""
            await send({"type": "http.response.body", "body": to_bytes(tail), "more_body": False})

    async def _first_events(self) -> str:
        self._chunks = Chunks(self._prepared.head, include_usage=self._prepared.stream.include_usage)
        begun = self._prepared.answer.begin(self._chunks)
        return begun + (await self._next_events() if self._exchange.has_items else "")

    async def _next_events(self) -> str:
        stream, chunks = self._prepared.answer.stream, self._chunks
        return "".join([stream(chunks, item) for item in await self._exchange.items()])

    def _tail(self) -> str:
        usage = self._chunks.usage(self._exchange.usage()) if self._prepared.stream.include_usage else ""
        return usage + DONE
