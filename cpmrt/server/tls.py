"""TLS connections, which are counted before their handshake, and have a limited time for it."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any

from cpmrt.server.connections import Connections
from cpmrt.server.http_protocol import HEAD_TIMEOUT_S, LimitedHttpProtocol


class TlsProtocol(SSLProtocol):
    """The TLS of one connection, counted in `all_connections` until the HTTP inside it takes its place.

    The event loop's own TLS tells nobody of a connection before its handshake is done.
    """

    def __init__(
        self, make_http: Callable[..., LimitedHttpProtocol], context: ssl.SSLContext, all_connections: Connections,
        **settings: Any,
    ):  # fmt: skip
        http = make_http(**settings, connected=self._end_handshake)
        super().__init__(
            asyncio.get_running_loop(), http, context, None,  # type: ignore[arg-type]
            server_side=True, ssl_handshake_timeout=HEAD_TIMEOUT_S,  # type: ignore[arg-type]
        )  # fmt: skip
        self._http, self._all_connections, self._is_in_handshake = http, all_connections, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = self._http.carrier = transport
        self._is_in_handshake = True
        super().connection_made(transport)
        self._all_connections.open(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._end_handshake()
        super().connection_lost(exc)

    def leave(self) -> None:
        self._raw.abort()

    def refuse(self) -> None:
        self._raw.abort()

    def _end_handshake(self) -> None:
        if self._is_in_handshake:
            self._is_in_handshake = False
            self._all_connections.close(self)
