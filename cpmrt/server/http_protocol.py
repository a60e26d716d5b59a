"""uvicorn's HTTP/1.1 connection with limits on a request's head (size, time) and on a client that stops reading.

The body's limits are in `json_body`. A connection that breaks a limit is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 120.0
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection with these limits."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes, self._is_in_head = 0, True
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._start("head", HEAD_TIMEOUT_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("head")
        self._stop("write")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
            self._start("head", HEAD_TIMEOUT_S, self._head_is_late)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        self._stop("head")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop("write")
        self._start("write", WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop("write")
        super().resume_writing()

    def _start(self, timer: str, seconds: float, call: Callable[[], None]) -> None:
        """Start a timer unless it runs."""
        if timer not in self._timers:
            self._timers[timer] = self.loop.call_later(seconds, call)

    def _stop(self, timer: str) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()

    def _head_is_late(self) -> None:
        self._stop("head")
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete:  # what comes early, during an answer, is waited for
            self.transport.close()
