"""The ASGI application: the endpoints, errors in the API's shape, and the gate that every request passes first."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from difflib import get_close_matches
from inspect import signature
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpmrt.errors import CpmrtError, RequestError
from cpmrt.server.access import ApiKeys
from cpmrt.server.api import Endpoints
from cpmrt.server.chat_page import OPEN_PREFIX
from cpmrt.server.errors import ApiError, as_api_error
from cpmrt.server.hosts import AllowedHosts
from cpmrt.server.json_body import ClientGoneError, shown
from cpmrt.server.responses import CLIENT_GONE, error_response
from cpmrt.server.service import Service
from cpmrt.server.telemetry import RequestRecord

_log = logging.getLogger("cpmrt.server")
_OPEN_PATHS = ("/", "/health", "/health/live", "/health/ready", "/openapi.json")
# Since 0.51 Starlette answers browsers that ask whether a page of another network may use this server (Private Network
# Access): it may not, unless the middleware is told otherwise.
_KNOWS_PRIVATE = "allow_private_network" in signature(CORSMiddleware).parameters
_PRIVATE_NETWORK: dict[str, Any] = {"allow_private_network": True} if _KNOWS_PRIVATE else {}


def make_app(service: Service) -> ASGIApp:
    routes = Endpoints(service).routes()
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: _answer,
            CpmrtError: _answer,
            ClientGoneError: _gone,
            HTTPException: _routing_error,
            Exception: _answer,
        },
    )
    app.router.redirect_slashes = False
    gate = Gate(app, service, routes)
    origins = service.settings.cors_origins
    if not origins:
        return gate
    # Around the gate: browsers send no key when they ask what they may send.
    return CORSMiddleware(
        gate, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"],
        expose_headers=["x-request-id"], **_PRIVATE_NETWORK,
    )  # fmt: skip


async def _answer(request: Request, error: Exception) -> Response:
    if not isinstance(error, (ApiError, RequestError)):
        _log.error("%s: %s", request.url.path[:100], error)
    return error_response(as_api_error(error), request.url.path)


async def _gone(request: Request, error: Exception) -> Response:
    """Answer a client that has gone: the status is for the log."""
    return Response(status_code=CLIENT_GONE)


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    headers, path = dict(error.headers or {}), request.url.path[:100]
    fix = f"; use {headers['Allow']}" if "Allow" in headers else _other_path(path, request.app)
    message = f"{request.method} {path}: {error.detail}{fix}"
    code = codes.get(error.status_code)
    return error_response(ApiError(error.status_code, message, code=code, headers=headers), request.url.path)


def _other_path(path: str, app: Starlette) -> str:
    """Return a hint that names the endpoint that a client means, such as one whose base URL lacks /v1."""
    paths = [route.path for route in app.routes if isinstance(route, Route) and "{" not in route.path]
    found = get_close_matches(path, paths, n=1, cutoff=0.7)
    return f"; did you mean {found[0]}?" if found else "; /openapi.json lists the endpoints"


class Gate:
    """Checks the API key and the host that a request means, counts it and logs it, around the application itself.

    Metrics count each of the `routes` by itself, whatever its parameters are, and all other paths together.
    """

    def __init__(self, app: ASGIApp, service: Service, routes: Sequence[Route]):
        self._app, self._metrics, self._routes, settings = app, service.metrics, routes, service.settings
        self._keys = ApiKeys(settings.api_keys)
        # Without a key, a page of any origin could reach this server by a name of its own that means 127.0.0.1.
        checks_host = bool(settings.allowed_hosts) or (settings.is_loopback and not self._keys)
        self._hosts = AllowedHosts((settings.host, *settings.allowed_hosts)) if checks_host else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        client = ":".join(map(str, scope["client"] or ("-",)))
        record = RequestRecord(client, f"req-{secrets.token_hex(8)}", scope["method"], scope["path"], send)
        record.attach(scope)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", record.id.encode())]}
            await send(message)

        try:
            refusal = self._refusal(scope)
            app: Any = self._app if refusal is None else error_response(refusal, record.path)
            await app(scope, receive, noted)
        finally:
            self._metrics.add_request(self._counted(record.path), record.status, perf_counter() - record.begun_at)
            record.write()
            record.detach(scope)

    def _counted(self, path: str) -> str:
        """Return the name that metrics have for a path: its route's, with the names of parameters for their values."""
        return next((route.path_format for route in self._routes if route.path_regex.match(path)), "other")

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        if self._hosts is not None:
            wrong = [value for name, value in headers if name == b"host" and not self._hosts.allow(value)]
            if wrong:
                name = shown(wrong[0].decode("latin-1"))
                return ApiError(403, f"{name} is no name of this server; see --allowed-host", code="wrong_host")
        is_open = scope["path"] in _OPEN_PATHS or scope["path"].startswith(OPEN_PREFIX)
        if not self._keys or is_open or self._keys.admit(headers):
            return None
        message = "missing or wrong API key; send it as Authorization: Bearer KEY"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
