"""HTTP requests and answers as plain data, so that they can travel between processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

_PROMPT_BYTES = 16 * 1024
_PROMPT_FIELDS = (b'"messages"', b'"prompt"', b'"input_prefix"', b'"input"')
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class RoutedRequest:
    """A whole HTTP request. `prompt` is the part of its body that tells which requests can share a cached beginning."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None

    @property
    def prompt(self) -> bytes:
        """The body from its first prompt field on, "" without one; its first 16 KiB, which tell prompts apart."""
        starts = [at for field in _PROMPT_FIELDS if (at := self.body.find(field)) >= 0]
        return self.body[min(starts) :][:_PROMPT_BYTES] if starts else b""


@dataclass(frozen=True)
class Head:
    """The status and the headers of an answer, which come before its body."""

    status: int
    headers: Headers


async def relay(app: ASGIApp, request: RoutedRequest) -> AsyncIterator[Head | bytes]:
    """Yield the answer of an application: its head, then its body in parts.

    For the application, closing the iterator means that the client has left.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    is_gone, is_read = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await is_gone.wait()
        return {"type": "http.disconnect"}

    task = asyncio.ensure_future(app(_scope(request), receive, messages.put))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            if message["type"] == "http.response.start":
                yield Head(message["status"], list(message["headers"]))
                continue
            body = [message.get("body", b"")]
            while not messages.empty() and (more := messages.get_nowait()) is not None:
                body.append(more.get("body", b""))
            if any(body):
                yield b"".join(body)
            if task.done() and messages.empty():
                break
        await task
    finally:
        is_gone.set()
        with suppress(Exception):  # nobody is left to be told
            await task


def _scope(request: RoutedRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": request.method,
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": request.headers,
        "client": request.client,
        "server": None,
    }
