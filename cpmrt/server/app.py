"""The ASGI application: endpoints, errors in the API's shape, the gate around them."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from cpmrt.errors import CpmrtError, RequestError
from cpmrt.server.api import Endpoints
from cpmrt.server.errors import ApiError, as_api_error
from cpmrt.server.gate import Gate
from cpmrt.server.json_body import ClientGoneError
from cpmrt.server.responses import CLIENT_GONE, error_response
from cpmrt.server.service import Service

_log = logging.getLogger("cpmrt.server")


def make_app(service: Service) -> ASGIApp:
    """The application of a service."""
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
    return Gate(app, service.settings, service.metrics, frozenset(route.path for route in routes))


async def _answer(request: Request, error: Exception) -> Response:
    if not isinstance(error, (ApiError, RequestError)):
        _log.error("%s: %s", request.url.path[:100], error)
    return error_response(as_api_error(error))


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the status is for the log."""
    return Response(status_code=CLIENT_GONE)


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    headers = dict(error.headers or {})
    return error_response(ApiError(error.status_code, message, code=codes.get(error.status_code), headers=headers))
