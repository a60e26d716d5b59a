"""An app for Ray Serve: replicas of one model on the GPUs of a cluster, behind one address.

    serve run cpmrt.deploy.ray_serve:build model=openbmb/MiniCPM4-8B max_replicas=4

Every endpoint of `cpmrt serve` works, streams included. A request goes to the replica that has most of its prompt in
its prefix cache (`prefix_router`). Replicas come and go with the load. When one dies, requests that it had not begun to
answer go to another; a stream that had begun ends with an error. Needs the extra: pip install 'cpmrt[ray]'.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel, Field
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cpmrt import LLM, env
from cpmrt.deploy.prefix_router import PrefixRouter
from cpmrt.deploy.relay import Head, RoutedRequest, relay
from cpmrt.server.app import make_app
from cpmrt.server.errors import ApiError, unavailable
from cpmrt.server.json_body import ClientGoneError, read_body
from cpmrt.server.responses import CLIENT_GONE, error_event, error_response
from cpmrt.server.service import ServerSettings, Service

_ATTEMPTS = 3
"""Replicas that a request may be given to, one after the other, until one begins to answer."""
_HOP_HEADERS = (b"connection", b"keep-alive", b"transfer-encoding")
"""Headers that hold for one connection only: the connection to the client has its own."""


class Settings(BaseModel):
    """The arguments of `build`. `llm` are more arguments of `LLM`, such as {"draft": "eagle2", "kv_dtype": "fp8"}.

    `api_keys` are those that requests must send, by default CPMRT_API_KEY where that is set. `max_body` is in bytes.
    """

    model: str | None = None
    served_model_name: str = "cpmrt"
    num_gpus: float = 1
    min_replicas: int = 1
    max_replicas: int = 1
    max_sequences: int = 8
    max_queue: int = 64
    max_body: int = 16 * 2**20
    api_keys: list[str] = Field(default_factory=lambda: [key] if (key := env.api_key()) else [])
    llm: dict[str, Any] = {}


def build(settings: Settings) -> serve.Application:
    """Return the app: replicas with the model, and an ingress that sends them the requests."""
    replicas = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_gpus": settings.num_gpus},
        max_ongoing_requests=settings.max_sequences + settings.max_queue,
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.max_sequences,
        ),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"imbalance": settings.max_sequences}
        ),
    )
    ingress = serve.deployment(Ingress, name="Ingress", max_ongoing_requests=2**16, ray_actor_options={"num_cpus": 0})
    return ingress.bind(replicas.bind(settings.model_dump()), settings.max_body)


class Replica:
    """One model and the service around it. `settings` are the fields of `Settings`."""

    async def __init__(self, settings: dict[str, Any]):  # type: ignore[misc]  # Ray Serve waits for it
        wanted = Settings(**settings)
        server = ServerSettings(
            wanted.served_model_name,
            host="0.0.0.0",
            api_keys=tuple(wanted.api_keys),
            max_queue=wanted.max_queue,
            max_body=wanted.max_body,
        )
        self._service = Service(server, lambda: LLM(wanted.model, max_sequences=wanted.max_sequences, **wanted.llm))
        self._app = make_app(self._service)
        await self._service.engine.loaded

    async def __call__(self, request: RoutedRequest) -> AsyncIterator[Head | bytes]:
        """Yield the head of the answer and its body in parts."""
        async for part in relay(self._app, request):
            yield part

    def check_health(self) -> None:
        """Raise if the device is lost: Ray Serve then starts another replica."""
        self._service.engine.check_ready()


class Ingress:
    """Takes the requests, gives each to a replica and sends its answer on."""

    def __init__(self, replicas: DeploymentHandle, max_body: int):
        self._replicas, self._max_body = replicas.options(stream=True), max_body

    async def __call__(self, request: Request) -> Response:
        """Answer a request. Its body is read whole, as the prompt decides where it goes."""
        try:
            body = await read_body(request.receive, request.headers.get("content-length"), self._max_body)
            return await self._answer(_routed(request, body))
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except ApiError as error:
            return error_response(error, request.url.path)

    async def _answer(self, request: RoutedRequest) -> Response:
        for _ in range(_ATTEMPTS):
            parts = self._replicas.remote(request)
            try:
                head = await anext(parts)
            except (RayError, RayServeException):
                continue
            is_stream = (b"content-type", b"text/event-stream; charset=utf-8") in head.headers
            response = StreamingResponse(_rest(parts, request.path if is_stream else None), head.status)
            response.raw_headers = [pair for pair in head.headers if pair[0] not in _HOP_HEADERS]
            return response
        raise unavailable("no replica could answer")


async def _rest(parts: Any, path: str | None) -> AsyncIterator[str | bytes]:
    """Yield the body. Where its replica dies, end the stream of `path` with an error, and cut off what is no stream."""
    try:
        async for part in parts:
            yield part
    except RayError:
        if path is None:
            raise
        yield error_event(unavailable("the replica that wrote this answer has died"), path)
    finally:
        parts.cancel()


def _routed(request: Request, body: bytes) -> RoutedRequest:
    client = (request.client.host, request.client.port) if request.client else None
    return RoutedRequest(
        request.method, request.scope["path"], request.scope["query_string"], request.scope["headers"], body, client
    )
