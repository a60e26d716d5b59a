"""The endpoints of the server: what each path answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cpmrt.server.chat_page import INDEX, OPEN_PREFIX, page_files
from cpmrt.server.embeddings import Embeddings
from cpmrt.server.errors import ApiError
from cpmrt.server.exchange import Exchange, usage_of
from cpmrt.server.infill import prepare_infill
from cpmrt.server.json_body import parse_object, read_body
from cpmrt.server.messages import count_tokens, prepare_message
from cpmrt.server.metrics import METRICS_TYPE, device_name
from cpmrt.server.openapi import document
from cpmrt.server.prompt_scores import PromptScores
from cpmrt.server.responses import EventStream, JsonResponse, LongJsonResponse, json_parts, whole_answer, written
from cpmrt.server.service import Prepared, Service
from cpmrt.server.telemetry import MAX_LOGGED_PROMPT, record_of
from cpmrt.server.tokenizing import detokenize, tokenize, tokenizer_info

Handler = Callable[[Request], Awaitable[Response]]


class Endpoints:
    """Handles the requests to one service."""

    def __init__(self, service: Service):
        self._service = service
        self._page = page_files()

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page),
            Route(OPEN_PREFIX + "{file:path}", self.page),
            Route("/health", self.ready),
            Route("/health/live", self.live),
            Route("/health/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._calls(count_tokens), methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/infill", self.infill, methods=["POST"]),
            Route("/tokenize", self._calls(tokenize), methods=["POST"]),
            Route("/detokenize", self._calls(detokenize), methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info),
        ]

    async def chat(self, request: Request) -> Response:
        return await self._complete(request, self._service.prepare_chat)

    async def responses(self, request: Request) -> Response:
        return await self._complete(request, self._service.prepare_response)

    async def completions(self, request: Request) -> Response:
        return await self._complete(request, self._service.prepare_completion)

    async def messages(self, request: Request) -> Response:
        return await self._complete(request, partial(prepare_message, self._service))

    async def embeddings(self, request: Request) -> Response:
        body = await self._body(request)
        work = await self._service.in_thread(lambda: Embeddings(self._service, parse_object(body)), len(body))
        await self._service.prompt_workers.run(work, request.receive)
        return LongJsonResponse(work.answer)

    async def infill(self, request: Request) -> Response:
        return await self._complete(request, partial(prepare_infill, self._service))

    async def models(self, request: Request) -> Response:
        names = self._service.settings.model_names
        return JsonResponse({"object": "list", "data": [self._model_card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        wanted = request.path_params["model"]
        if wanted not in self._service.settings.model_names:
            message = f"the model {wanted[:100]!r} does not exist here"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JsonResponse(self._model_card(wanted))

    async def tokenizer_info(self, request: Request) -> Response:
        return JsonResponse(await self._service.in_thread(lambda: tokenizer_info(self._service)))

    async def live(self, request: Request) -> Response:
        """Answer 200 as long as the event loop runs."""
        return JsonResponse({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """Answer 200 if requests are taken, else 503 with the reason."""
        self._service.engine.check_ready()
        return JsonResponse({"status": "ready", "model": self._service.settings.model_name})

    async def metrics(self, request: Request) -> Response:
        engine = self._service.engine
        llm = engine.llm if engine.state == "ready" else None
        text = await asyncio.to_thread(self._service.metrics.text, engine.open_jobs, llm)
        return Response(text, media_type=METRICS_TYPE)

    async def openapi(self, request: Request) -> Response:
        """Answer with the OpenAPI document, which has the model's vocabulary and vector sizes once it is loaded."""
        engine, names = self._service.engine, self._service.settings.model_names
        if engine.state != "ready":
            return JsonResponse(document(names))
        config = engine.llm.config
        return JsonResponse(document(names, config.vocab_size, config.hidden_size))

    async def page(self, request: Request) -> Response:
        """Answer with a file of the chat page; index.html is served at "/" only."""
        file = self._page.get(request.path_params.get("file", INDEX))
        if file is None or request.path_params.get("file") == INDEX:
            raise ApiError(404, "the chat page has no such file", code="not_found")
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, headers=file.headers)

    def _calls(self, call: Callable[[Service, dict[str, Any]], dict[str, Any]]) -> Handler:
        """Return a handler that answers with what `call` makes of the request's body, in a worker thread."""

        async def handle(request: Request) -> Response:
            body = await self._body(request)

            def answer() -> Response:
                return LongJsonResponse(json_parts(call(self._service, parse_object(body))))

            return await self._service.in_thread(answer, len(body))

        return handle

    async def _complete(self, request: Request, prepare: Callable[[dict[str, Any]], Prepared]) -> Response:
        self._service.engine.check_room()
        body = await self._body(request)
        prepared = await self._service.prepared(prepare, body)
        record = record_of(request.scope)
        record.id = prepared.id
        if self._service.settings.log_prompts:
            record.prompt = body[:MAX_LOGGED_PROMPT]
        score = self._scoring(prepared, request) if prepared.scored else None
        if not prepared.generates:
            if score is not None:
                await score()
            return await written(prepared, usage_of(prepared.num_prompt_tokens, 0, 0))
        exchange = Exchange(self._service.engine, prepared, request.receive, before=score)
        record.ended = exchange.ended
        if prepared.wanted.streams:
            return EventStream(prepared, exchange)
        return await whole_answer(prepared, exchange)

    def _scoring(self, prepared: Prepared, request: Request) -> Callable[[], Awaitable[None]]:
        """Return a call that gives the prompts of a request their log-probabilities."""
        scores = PromptScores(self._service.engine.llm, prepared.scored)
        return partial(self._service.prompt_workers.run, scores, request.receive)

    async def _body(self, request: Request) -> bytes:
        """Read the body of a request, which must say that it is JSON and not that it is compressed."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # Pages of other origins can send anything else without asking first.
            raise ApiError(400, "send JSON with the header Content-Type: application/json", code="invalid_content_type")
        if request.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            message = "send the body uncompressed, without the header Content-Encoding"
            raise ApiError(
                415, message, code="unsupported_content_encoding", headers={"Accept-Encoding": "identity"}
            )  # fmt: skip
        limit = self._service.settings.body_limit(self._service.engine.llm.max_context)
        length = request.headers.get("content-length")
        return await read_body(request.receive, length, limit, self._service.over)

    def _model_card(self, name: str) -> dict[str, Any]:
        service = self._service
        llm = service.engine.llm
        card = {"id": name, "object": "model", "created": service.started, "owned_by": "cpmrt"}
        card |= {"root": service.settings.model_name, "max_model_len": llm.max_context}
        return {**card, "device": device_name(llm), "sampling_defaults": asdict(llm.sampling_defaults)}
