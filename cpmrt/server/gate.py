"""What every request passes first: the API key, the host it means, its line in the log."""

from __future__ import annotations

import hashlib
import secrets
from hmac import compare_digest
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpmrt.server.errors import ApiError
from cpmrt.server.metrics import Metrics
from cpmrt.server.request_log import RequestRecord, attach
from cpmrt.server.responses import error_response
from cpmrt.server.settings import ServerSettings

_OPEN_PATHS = ("/", "/health", "/health/live", "/health/ready", "/openapi.json")
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "")


class Gate:
    """An ASGI application around another. `paths` are those that metrics name; others count together."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, paths: frozenset[str]):
        self._app, self._metrics, self._paths = app, metrics, paths
        self._key = _digest(settings.api_key.encode()) if settings.api_key else None
        # Without a key, a page of any origin could reach this server by a name of its own that means 127.0.0.1.
        self._checks_host = settings.is_loopback and self._key is None
        self._own_host = settings.host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        record = RequestRecord(f"req-{secrets.token_hex(8)}", scope["method"], scope["path"])
        attach(scope, record)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", record.id.encode())]}
            await send(message)

        try:
            refusal = self._refusal(scope)
            app: Any = self._app if refusal is None else error_response(refusal)
            await app(scope, receive, noted)
        finally:
            path = record.path if record.path in self._paths else "other"
            self._metrics.requests.labels(path, str(record.status)).inc()
            record.write()

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = {name: value for name, value in scope["headers"] if name in (b"authorization", b"host")}
        if self._checks_host and not self._is_own(headers.get(b"host", b"")):
            message = "this server answers only to localhost; give it an API key to open it to other names"
            return ApiError(403, message, code="wrong_host")
        if self._key is None or scope["path"] in _OPEN_PATHS:
            return None
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and compare_digest(_digest(token.strip()), self._key):
            return None
        message = "missing or wrong API key; send it as Authorization: Bearer KEY"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_own(self, host: bytes) -> bool:
        name = host.decode("latin-1").lower()
        if not name.endswith("]"):
            name = name.rpartition(":")[0] or name
        return name in _LOOPBACK_NAMES or name == self._own_host or name.startswith("127.")


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key's: the comparison tells nothing of it."""
    return hashlib.sha256(key).digest()
