"""The OpenAPI document of the server. It is written by hand; tests compare it with the code."""

from __future__ import annotations

from collections.abc import Sequence

from cpmrt import __version__
from cpmrt.server.chat_page import INDEX, page_files
from cpmrt.server.openapi_answers import answer_schemas
from cpmrt.server.openapi_requests import request_schemas
from cpmrt.server.openapi_types import STRING, Schema, optional, ref


def document(models: Sequence[str] = (), vocab_size: int = 2**31, hidden_size: int | None = None) -> Schema:
    """Return the OpenAPI document of a server whose model has these names; without names, of any server."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "cpmrt", "version": __version__, "summary": "An OpenAI-compatible API for one local model"},
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": _post("ChatRequest", "ChatCompletion", "Answer a conversation", streams=True),
            "/v1/completions": _post("CompletionRequest", "Completion", "Continue prompts", streams=True),
            "/v1/responses": _post("ResponsesRequest", "Response", "Answer, in OpenAI's newer API", streams=True),
            "/v1/messages": _post(
                "MessageRequest", "Message", "Answer, as Anthropic does", streams=True, error="MessageError"
            ),
            "/v1/messages/count_tokens": _post(
                "CountRequest", "Count", "The tokens that a conversation takes", error="MessageError"
            ),
            "/v1/embeddings": _post("EmbeddingRequest", "Embeddings", "Texts as vectors"),
            "/infill": _post("InfillRequest", "Infill", "Fill in the middle, as llama.cpp has it", streams=True),
            "/v1/models": _get("ModelList", "The names of the model that is served"),
            "/v1/models/{model}": _get("Model", "One model", "404", parameters=(_MODEL,)),
            "/tokenize": _post("TokenizeRequest", "Tokens", "Text or a chat to token ids"),
            "/detokenize": _post("DetokenizeRequest", "Text", "Token ids to text"),
            "/tokenizer_info": _get("TokenizerInfo", "Special tokens, chat template and size of the vocabulary", "400"),
            "/health": _get("Health", "Whether requests are taken", is_open=True),
            "/health/live": _get("Health", "Whether the process answers", is_open=True),
            "/health/ready": _get("Health", "Whether requests are taken", is_open=True),
            "/metrics": _plain_get("text/plain", "Prometheus metrics"),
            "/": _plain_get("text/html", "The chat page", is_open=True),
            "/page/{file}": _page_file(),
            "/openapi.json": _plain_get("application/json", "This document", is_open=True),
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                **request_schemas(),
                **answer_schemas(),
                "ModelName": {"enum": [*models, None]} if models else optional("string"),
                "TokenId": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
                "Dimensions": {"enum": [hidden_size, None]} if hidden_size else optional("integer"),
            },
        },
    }


def _body(schema: Schema, kind: str = "application/json") -> Schema:
    return {kind: {"schema": schema}}


def _errors(*statuses: str, schema: str = "Error") -> Schema:
    return {status: {"description": "Error", "content": _body(ref(schema))} for status in statuses}


def _post(request: str, answer: str, summary: str, *, streams: bool = False, error: str = "Error") -> Schema:
    content = _body(ref(answer))
    if streams:
        content |= _body({}, "text/event-stream")
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _body(ref(request))},
            "responses": {"200": {"description": "Done", "content": content}}
            | _errors("400", "401", "404", "408", "413", "415", "429", "500", "503", schema=error),
        }
    }


def _get(
    answer: str, summary: str, *statuses: str, parameters: tuple[Schema, ...] = (), is_open: bool = False
) -> Schema:
    responses = {"200": {"description": "Done", "content": _body(ref(answer))}} | _errors("503", *statuses)
    operation = {"summary": summary, "parameters": list(parameters), "responses": responses}
    return {"get": operation | _access(responses, is_open=is_open)}


def _plain_get(kind: str, summary: str, *, is_open: bool = False) -> Schema:
    content = _body({"type": "object"} if kind == "application/json" else {"type": "string"}, kind)
    responses = {"200": {"description": "Done", "content": content}}
    return {"get": {"summary": summary, "responses": responses} | _access(responses, is_open=is_open)}


def _access(responses: Schema, *, is_open: bool) -> Schema:
    """Return the part of an operation about API keys: that it needs none, or answers 401 without a right one."""
    return {"security": [{}]} if is_open else {"responses": responses | _errors("401")}


def _page_file() -> Schema:
    kinds = ("text/css", "text/javascript", "image/svg+xml")
    content = {kind: {"schema": {"type": "string"}} for kind in kinds}
    done = {"200": {"description": "Done", "content": content}, "304": {"description": "Not changed"}}
    names = {"enum": [name for name in page_files() if name != INDEX]}
    parameter = {"name": "file", "in": "path", "required": True, "schema": names}
    operation = {"summary": "A file of the chat page", "security": [{}], "parameters": [parameter]}
    return {"get": operation | {"responses": done | _errors("404")}}


_MODEL = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"allOf": [ref("ModelName"), STRING]},
}
