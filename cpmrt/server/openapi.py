"""The OpenAPI document of the server: what its endpoints take and give. Kept by hand; tests hold it to the code."""

from __future__ import annotations

from typing import Any

from cpmrt import __version__
from cpmrt.config.sampling import MAX_LOGPROBS
from cpmrt.server.sampling import MAX_CHOICES, MAX_STOP
from cpmrt.server.schema import MAX_PROMPTS

Schema = dict[str, Any]


def document() -> Schema:
    """The document, as JSON data."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "cpmrt", "version": __version__, "summary": "An OpenAI-compatible API for one local model"},
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": _post("ChatRequest", "ChatCompletion", "Answer a conversation", streams=True),
            "/v1/completions": _post("CompletionRequest", "Completion", "Continue prompts", streams=True),
            "/v1/models": _get("ModelList", "The model that is served"),
            "/v1/models/{model}": _get("Model", "One model", statuses=("401", "404", "503"), parameters=[_MODEL]),
            "/tokenize": _post("TokenizeRequest", "Tokens", "Text to token ids"),
            "/detokenize": _post("DetokenizeRequest", "Text", "Token ids to text"),
            "/health": _get("Health", "Whether requests are taken", is_open=True),
            "/health/live": _get("Health", "Whether the process answers", is_open=True),
            "/health/ready": _get("Health", "Whether requests are taken", is_open=True),
            "/metrics": _plain_get("text/plain", "Prometheus metrics"),
            "/": _plain_get("text/html", "The chat page"),
            "/openapi.json": _plain_get("application/json", "This document"),
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": _requests() | _answers(),
        },
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _body(schema: Schema, kind: str = "application/json") -> Schema:
    return {kind: {"schema": schema}}


def _errors(*statuses: str) -> Schema:
    return {status: {"description": "Error", "content": _body(_ref("Error"))} for status in statuses}


def _post(request: str, answer: str, summary: str, *, streams: bool = False) -> Schema:
    content = _body(_ref(answer))
    if streams:
        content |= _body({}, "text/event-stream")
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _body(_ref(request))},
            "responses": {"200": {"description": "Done", "content": content}}
            | _errors("400", "401", "404", "408", "413", "429", "500", "503"),
        }
    }


def _get(
    answer: str,
    summary: str,
    *,
    parameters: Any = (),
    statuses: tuple[str, ...] = ("401", "503"),
    is_open: bool = False,
) -> Schema:
    operation: Schema = {"summary": summary, "parameters": list(parameters)}
    operation["responses"] = {"200": {"description": "Done", "content": _body(_ref(answer))}} | _errors(*statuses)
    return {"get": operation | ({"security": [{}]} if is_open else {})}


def _plain_get(kind: str, summary: str) -> Schema:
    content = _body({"type": "object"} if kind == "application/json" else {"type": "string"}, kind)
    done = {"200": {"description": "Done", "content": content}}
    return {"get": {"summary": summary, "responses": done | _errors("401")}}


_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}


def _optional(*types: str, **rules: Any) -> Schema:
    """A field that may be null."""
    return {"type": [*types, "null"], **rules}


def _array(items: Schema, **rules: Any) -> Schema:
    return {"type": "array", "items": items, **rules}


def _object(properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_TOKEN_IDS = _array({"type": "integer", "minimum": 0})
_SHARED: Schema = {
    "model": _optional("string", description="The name in /v1/models, or nothing"),
    "temperature": _optional("number", minimum=0, default=1),
    "top_p": _optional("number", exclusiveMinimum=0, maximum=1, default=1),
    "top_k": _optional("integer", default=0),
    "min_p": _optional("number", minimum=0, maximum=1, default=0),
    "repetition_penalty": _optional("number", minimum=0.001, maximum=1000, default=1),
    "presence_penalty": _optional("number", minimum=-100, maximum=100, default=0),
    "frequency_penalty": _optional("number", minimum=-100, maximum=100, default=0),
    "logit_bias": _optional("object", additionalProperties={"type": "number", "minimum": -100, "maximum": 100}),
    "n": _optional("integer", minimum=1, maximum=MAX_CHOICES, default=1),
    "stop": {
        "anyOf": [_optional("string", minLength=1), _array({"type": "string", "minLength": 1}, maxItems=MAX_STOP)]
    },
    "stop_token_ids": _optional("array", items=_INTEGER, maxItems=MAX_STOP),
    "ignore_eos": _optional("boolean", default=False),
    "seed": _optional("integer"),
    "stream": _optional("boolean", default=False),
    "stream_options": {"anyOf": [{"type": "null"}, _object({"include_usage": _optional("boolean")})]},
}


def _requests() -> Schema:
    part = _object({"type": {"const": "text"}, "text": _STRING}, ("type", "text"))
    message = _object(
        {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"anyOf": [_optional("string"), _array(part)]},
            "tool_calls": _optional("array", items={"type": "object"}),
            "tool_call_id": _optional("string"),
        },
        ("role",),
    )
    function = _object({"name": _STRING, "description": _STRING, "parameters": {"type": "object"}}, ("name",))
    chat = {
        **_SHARED,
        "messages": _array(message, minItems=1),
        "max_tokens": _optional("integer", minimum=1),
        "max_completion_tokens": _optional("integer", minimum=1),
        "logprobs": _optional("boolean"),
        "top_logprobs": _optional("integer", minimum=0, maximum=MAX_LOGPROBS),
        "tools": _optional("array", items=_object({"type": {"const": "function"}, "function": function})),
        "tool_choice": {"enum": ["none", "auto", None]},
        "chat_template_kwargs": _optional("object", description="Variables of the template, such as enable_thinking"),
    }
    prompts = [_STRING, _TOKEN_IDS, _array(_STRING, maxItems=MAX_PROMPTS), _array(_TOKEN_IDS, maxItems=MAX_PROMPTS)]
    completion = {
        **_SHARED,
        "prompt": {"anyOf": prompts},
        "max_tokens": _optional("integer", minimum=1, default=16),
        "echo": _optional("boolean", default=False),
        "logprobs": _optional("integer", minimum=0, maximum=MAX_LOGPROBS),
    }
    tokenize = {"prompt": _STRING, "content": _STRING, "add_special_tokens": _optional("boolean", default=True)}
    return {
        "ChatRequest": _object(chat, ("messages",)),
        "CompletionRequest": _object(completion, ("prompt",)),
        "TokenizeRequest": _object(tokenize),
        "DetokenizeRequest": _object({"tokens": _TOKEN_IDS}, ("tokens",)),
    }


def _answers() -> Schema:
    usage = _object(
        {
            "prompt_tokens": _INTEGER,
            "completion_tokens": _INTEGER,
            "total_tokens": _INTEGER,
            "prompt_tokens_details": _object({"cached_tokens": _INTEGER}, ("cached_tokens",)),
        },
        ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"),
    )
    message = _object(
        {
            "role": {"const": "assistant"},
            "content": _optional("string"),
            "reasoning_content": _STRING,
            "refusal": {"type": "null"},
            "tool_calls": _array({"type": "object"}),
        },
        ("role", "content"),
    )
    return {
        "ChatCompletion": _completion("chat.completion", {"message": message}, ["stop", "length", "tool_calls"], usage),
        "Completion": _completion("text_completion", {"text": _STRING}, ["stop", "length"], usage),
        "Model": _object({"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _STRING,
                          "max_model_len": _INTEGER}, ("id", "object", "created", "owned_by")),
        "ModelList": _object({"object": {"const": "list"}, "data": _array(_ref("Model"))}, ("object", "data")),
        "Tokens": _object({"tokens": _TOKEN_IDS, "count": _INTEGER, "max_model_len": _INTEGER}, ("tokens", "count")),
        "Text": _object({"prompt": _STRING}, ("prompt",)),
        "Health": _object({"status": _STRING, "model": _STRING}, ("status",)),
        "Error": _object({"error": _object(
            {"message": _STRING, "type": _STRING, "param": _optional("string"), "code": _optional("string")},
            ("message", "type", "param", "code"),
        )}, ("error",)),
    }  # fmt: skip


def _completion(kind: str, content: Schema, reasons: list[str], usage: Schema) -> Schema:
    choice = {
        "index": _INTEGER, **content, "logprobs": _optional("object"), "finish_reason": {"enum": reasons},
    }  # fmt: skip
    return _object(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _INTEGER,
            "model": _STRING,
            "system_fingerprint": _STRING,
            "choices": _array(_object(choice, tuple(choice))),
            "usage": usage,
        },
        ("id", "object", "created", "model", "choices", "usage"),
    )
