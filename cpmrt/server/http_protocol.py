"""uvicorn's HTTP/1.1 connection with limits on a request's head (size, time) and on clients that do not read or vanish.

The body's limits are in `json_body`. A connection that breaks a limit is closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cpmrt.server.connections import Connections
from cpmrt.server.request_parser import RequestParser

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 120.0
MAX_PIPELINED = 16
_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""A client whose machine or network is gone is noticed after 30 seconds, whether it is being sent something or not."""
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection with the limits above, counted in `all_connections`. `connected` is called when it is made."""

    def __init__(
        self, *args: Any, all_connections: Connections, connected: Callable[[], None] = lambda: None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self.parser: RequestParser = RequestParser(self)
        self._all_connections, self._connected = all_connections, connected
        self._head_bytes, self._is_in_head = 0, True
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._running: list[Any] = []
        """uvicorn's cycles of the requests whose answers are not complete; the first of them runs."""
        self.carrier: asyncio.Transport | None = None
        """The transport that sends the encrypted bytes, if `transport` has TLS."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _keep_alive(transport)
        self._start("head", HEAD_TIMEOUT_S, self._head_is_late)
        self._connected()
        self._all_connections.open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all_connections.close(self)
        self._stop("head")
        self._stop("write")
        for cycle in self._running:  # uvicorn tells only the last of several
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def leave(self) -> None:
        self._leave_at_once()

    def shutdown(self) -> None:
        if self._has_no_request:
            self._leave_at_once()
        else:
            super().shutdown()

    def refuse(self) -> None:
        self.transport.write(_BUSY)
        self._leave_at_once()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
            self._start("head", HEAD_TIMEOUT_S, self._head_is_late)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        if self.parser.is_refusing:
            return
        self._is_in_head, self._head_bytes = False, 0
        self._stop("head")
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)
        self._all_connections.begin_request(self)
        self._running = [cycle for cycle in self._running if not cycle.response_complete] + [self.cycle]
        if len(self._running) > MAX_PIPELINED:
            self.transport.abort()
        elif len(self._running) > 1:
            self.flow.resume_reading()  # else nobody would see that the client leaves

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            self._all_connections.end_request(self)

    def on_message_complete(self) -> None:
        if self.parser.is_refusing:
            return
        self._is_in_head = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop("write")
        self._start("write", WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop("write")
        super().resume_writing()

    @property
    def _has_no_request(self) -> bool:
        cycle: Any = self.cycle
        return cycle is None or bool(cycle.response_complete)

    def _start(self, timer: str, seconds: float, call: Callable[[], None]) -> None:
        """Start a timer unless it runs."""
        if timer not in self._timers:
            self._timers[timer] = self.loop.call_later(seconds, call)

    def _stop(self, timer: str) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()

    def _leave_at_once(self) -> None:
        """Close as soon as everything is sent: TLS would wait for an answer of the client first."""
        transports = (self.transport, self.carrier or self.transport)
        if any(transport.get_write_buffer_size() for transport in transports):
            self.transport.close()
        else:
            self.transport.abort()

    def _head_is_late(self) -> None:
        self._stop("head")
        if self._has_no_request:  # a head that comes early, during an answer, may take longer
            self.transport.close()


def _send_without_chunks(cycle: Any) -> None:
    """Have an answer without a length end where its connection does: clients that speak HTTP/1.0 know no chunks."""
    send, cycle.chunked_encoding = cycle.send, False

    async def send_plain(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain


def _keep_alive(transport: asyncio.Transport) -> None:
    """Have the kernel probe a silent client, and close the connection of one that is gone."""
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
