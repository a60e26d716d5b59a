"""The OpenAPI document of the server. It is written by hand; tests compare it with the code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cpmrt import __version__
from cpmrt.config.sampling import MAX_LOGPROBS
from cpmrt.server.chat_page import INDEX, page_files
from cpmrt.server.embeddings import MAX_INPUTS
from cpmrt.server.responses_request import TEXT_PARTS
from cpmrt.server.schema import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_STOP,
    MAX_STOP_BYTES,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPLATE_VARIABLES,
    MAX_TOOLS,
    REASONING_EFFORTS,
    RESERVED_TEMPLATE_NAMES,
)
from cpmrt.server.unused_fields import HARMLESS

Schema = dict[str, Any]


def document(models: Sequence[str] = (), vocab_size: int = 2**31, hidden_size: int | None = None) -> Schema:
    """Return the document of a server of one model, which has these names; without them, of any server."""
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
            "/": _plain_get("text/html", "The chat page"),
            "/page/{file}": _page_file(),
            "/openapi.json": _plain_get("application/json", "This document"),
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                **_requests(),
                **_answers(),
                "ModelName": {"enum": [*models, None]} if models else _optional("string"),
                "TokenId": {"type": "integer", "minimum": 0, "maximum": vocab_size - 1},
                "Dimensions": {"enum": [hidden_size, None]} if hidden_size else _optional("integer"),
            },
        },
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _body(schema: Schema, kind: str = "application/json") -> Schema:
    return {kind: {"schema": schema}}


def _errors(*statuses: str, schema: str = "Error") -> Schema:
    return {status: {"description": "Error", "content": _body(_ref(schema))} for status in statuses}


def _post(request: str, answer: str, summary: str, *, streams: bool = False, error: str = "Error") -> Schema:
    content = _body(_ref(answer))
    if streams:
        content |= _body({}, "text/event-stream")
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _body(_ref(request))},
            "responses": {"200": {"description": "Done", "content": content}}
            | _errors("400", "401", "404", "408", "413", "429", "500", "503", schema=error),
        }
    }


def _get(
    answer: str, summary: str, *statuses: str, parameters: tuple[Schema, ...] = (), is_open: bool = False
) -> Schema:
    responses = {"200": {"description": "Done", "content": _body(_ref(answer))}} | _errors("401", "503", *statuses)
    operation = {"summary": summary, "parameters": list(parameters), "responses": responses}
    return {"get": operation | ({"security": [{}]} if is_open else {})}


def _plain_get(kind: str, summary: str) -> Schema:
    content = _body({"type": "object"} if kind == "application/json" else {"type": "string"}, kind)
    done = {"200": {"description": "Done", "content": content}}
    return {"get": {"summary": summary, "responses": done | _errors("401")}}


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
    "schema": {"allOf": [{"$ref": "#/components/schemas/ModelName"}, {"type": "string"}]},
}


def _optional(*types: str, **rules: Any) -> Schema:
    """Return a field that may be null."""
    return {"type": [*types, "null"], **rules}


def _array(items: Schema, **rules: Any) -> Schema:
    return {"type": "array", "items": items, **rules}


def _object(required: Schema, optional: Schema | None = None, rules: Sequence[Schema] = ()) -> Schema:
    described = {"type": "object", "properties": required | (optional or {}), "required": list(required)}
    return described | ({"allOf": list(rules)} if rules else {})


def _either(*alternatives: Schema) -> Schema:
    """Return the rule that an object has the fields of one of these: each with its values, all of them given."""
    return {"anyOf": [{"properties": fields, "required": list(fields)} for fields in alternatives]}


def _unless(field: Schema, needed: Schema) -> Schema:
    """Return the rule that a field has the given values, or is not there, unless the needed fields are given."""
    return {"anyOf": [{"properties": field}, {"properties": needed, "required": list(needed)}]}


_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_TRUE, _NULL = {"const": True}, {"type": "null"}
_HIGHEST = 2**64 - 1
_TOKEN_IDS = _array(_ref("TokenId"), minItems=1)
_MAX_TOKENS = _optional(
    "integer", minimum=1, maximum=_HIGHEST, description="Default: until the model ends or the context is full"
)
_OWN = "Default: the model's own, see sampling_defaults in /v1/models"
_SHARED: Schema = {
    "model": _ref("ModelName") | {"description": "A name in /v1/models, or nothing"},
    "temperature": _optional("number", minimum=0, maximum=1e6, description=_OWN),
    "top_p": _optional("number", minimum=1e-9, maximum=1, description=_OWN),
    "top_k": _optional("integer", minimum=-_HIGHEST, maximum=2**31 - 1, description=_OWN),
    "min_p": _optional("number", minimum=0, maximum=1, description=_OWN),
    "repetition_penalty": _optional("number", minimum=0.001, maximum=1000, description=_OWN),
    "presence_penalty": _optional("number", minimum=-100, maximum=100, default=0),
    "frequency_penalty": _optional("number", minimum=-100, maximum=100, default=0),
    "loop_repeats": {
        "anyOf": [_NULL, {"const": 0}, {"type": "integer", "minimum": 2, "maximum": 1000}],
        "default": 0,
        "description": "End an answer that repeats itself so often",
    },
    "loop_penalty": _optional(
        "number", minimum=1, maximum=1000, description=f"First raise the repetition penalty of a loop to this. {_OWN}"
    ),
    "max_thinking_tokens": _optional(
        "integer", minimum=1, maximum=2**31 - 1, description="Close a thought after so many tokens"
    ),
    "response_format": {
        "description": "What the answer must look like",
        "anyOf": [
            {"type": "null"},
            _object({"type": {"enum": ["text", "json_object"]}}),
            _object({"type": {"const": "json_schema"}, "json_schema": _object({"schema": {"type": "object"}})}),
        ],
    },
    "structured_outputs": _optional("object", description="With one of json, regex, choice, grammar, json_object"),
    "json_schema": _optional("object", description="As guided_json"),
    "regex": _optional("string", description="As guided_regex"),
    "grammar": _optional("string", description="As guided_grammar"),
    "ebnf": _optional("string", description="As guided_grammar"),
    "guided_json": {"anyOf": [_optional("object"), {"type": "string"}], "description": "A JSON schema of the answer"},
    "guided_regex": _optional("string", minLength=1, description="A regular expression that the answer matches"),
    "guided_choice": _optional("array", items={"type": "string", "minLength": 1}, minItems=1),
    "guided_grammar": _optional("string", minLength=1, description="A grammar of the answer, of Lark or GBNF"),
    "logit_bias": _optional(
        "object",
        propertyNames={"pattern": "^[0-9]{1,9}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
    ),
    "n": _optional("integer", minimum=1, maximum=MAX_CHOICES, default=1),
    "stop": {
        "anyOf": [_optional("string", minLength=1), _array({"type": "string", "minLength": 1}, maxItems=MAX_STOP)],
        "description": f"At most {MAX_STOP_BYTES} bytes together",
    },
    "stop_token_ids": _optional(
        "array", items={"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, maxItems=MAX_STOP_TOKEN_IDS
    ),
    "ignore_eos": _optional("boolean", default=False),
    "seed": _optional("integer", minimum=-_HIGHEST, maximum=_HIGHEST),
    "stream": _optional("boolean", default=False),
    "stream_options": {"anyOf": [_NULL, _object({}, {"include_usage": _optional("boolean")})]},
}
_ARGUMENTS = _optional("string", "object", description="A JSON object, or a string with one")
_OPTIONS_OF_STREAMS = _unless({"stream_options": _NULL}, {"stream": _TRUE})


def _unused() -> Schema:
    return {name: _optional(kind, description="Accepted, without effect") for name, kind in HARMLESS.items()}


def _requests() -> Schema:
    chat, message = _chat_fields(), _chat_message()
    messages = _array(message, minItems=1)
    tool_choice = _unless({"tool_choice": {"enum": ["none", None]}}, {"tools": _array({}, minItems=1)})
    tokenize = {
        "prompt": _optional("string"),
        "content": _optional("string"),
        "add_special_tokens": _optional("boolean", default=True),
        "messages": {"anyOf": [_NULL, messages]},
        "add_generation_prompt": _optional("boolean", default=True),
        "return_token_strs": _optional("boolean", default=False),
        "with_pieces": _optional("boolean", default=False),
        **{name: chat[name] for name in ("tools", "tool_choice", "chat_template_kwargs", "allow_special_tokens")},
    }
    return {
        "ChatRequest": _object(
            {"messages": messages},
            chat,
            [
                _OPTIONS_OF_STREAMS,
                _unless({"top_logprobs": {"enum": [0, None]}}, {"logprobs": _TRUE}),
                tool_choice,
            ],
        ),
        "ResponsesRequest": _object(
            {"input": {"anyOf": [_STRING, _array(_response_item(), minItems=1)]}},
            _responses_fields(),
            [_unless({"tool_choice": {"enum": ["none", None]}}, {"tools": _array({}, minItems=1)})],
        ),
        "CompletionRequest": _completion_request(),
        **_message_requests(),
        "EmbeddingRequest": _object({"input": _prompts(MAX_INPUTS)}, _embedding_fields()),
        "InfillRequest": _object({}, _infill_fields(), [_OPTIONS_OF_STREAMS]),
        "TokenizeRequest": _object(
            {}, tokenize, [_either({"prompt": _STRING}, {"content": _STRING}, {"messages": messages}), tool_choice]
        ),
        "DetokenizeRequest": _object({"tokens": _array({"type": "integer", "minimum": 0, "maximum": 2**32 - 1})}),
    }


def _prompts(most: int) -> Schema:
    """Return one prompt or several, at most so many, each a text or token ids."""
    several = _array({"anyOf": [_STRING, _TOKEN_IDS]}, minItems=1, maxItems=most)
    return {"anyOf": [_STRING, _TOKEN_IDS, several]}


def _chat_message() -> Schema:
    part = _object({"type": {"const": "text"}, "text": _STRING})
    call = _object({"function": _object({"name": _STRING}, {"arguments": _ARGUMENTS})})
    text = {"anyOf": [_STRING, _array(part)]}
    return _object(
        {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}},
        {
            "content": {"anyOf": [_NULL, *text["anyOf"]]},
            "tool_calls": _optional("array", items=call),
            "tool_call_id": {},
            "function_call": _NULL,
        },
        [_either({"content": text}, {"tool_calls": _array({}, minItems=1)})],
    )


def _chat_fields() -> Schema:
    function = _object({"name": _STRING}, {"description": {}, "parameters": {"type": "object"}})
    tool = _object({"type": {"const": "function"}, "function": function})
    return {
        **_SHARED,
        **_unused(),
        "max_tokens": _MAX_TOKENS,
        "max_completion_tokens": _MAX_TOKENS,
        "logprobs": _optional("boolean"),
        "top_logprobs": _optional("integer", minimum=0, maximum=MAX_LOGPROBS),
        "tools": _optional("array", items=tool, maxItems=MAX_TOOLS),
        "tool_choice": {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                _object({"type": {"const": "function"}, "function": _object({"name": _STRING})}),
            ],
        },
        "parallel_tool_calls": _optional("boolean", default=True, description="false: the first call alone is given"),
        "reasoning_effort": {
            "enum": [*REASONING_EFFORTS, None],
            "description": "none and minimal: no thoughts, others: thoughts, if the model's template can choose",
        },
        "chat_template_kwargs": _optional(
            "object",
            propertyNames={"not": {"enum": sorted(RESERVED_TEMPLATE_NAMES)}},
            maxProperties=MAX_TEMPLATE_VARIABLES,
            description="Variables of the template, as enable_thinking",
        ),
        "allow_special_tokens": _optional(
            "boolean", default=False, description="Special tokens in messages of users and tools count as such"
        ),
    }


def _response_item() -> Schema:
    """Return what an array of input has: messages, calls, their results, and thoughts, which are passed over."""
    part = _object({"type": {"enum": sorted(TEXT_PARTS)}, "text": _STRING})
    text = {"anyOf": [_STRING, _array(part)]}
    roles = {"enum": ["system", "developer", "user", "assistant"]}
    return {
        "anyOf": [
            _object({"role": roles, "content": text}, {"type": {"const": "message"}}),
            _object({"type": {"const": "function_call"}, "name": _STRING}, {"arguments": _ARGUMENTS}),
            _object({"type": {"const": "function_call_output"}, "output": text}),
            _object({"type": {"const": "reasoning"}}),
        ]
    }


def _responses_fields() -> Schema:
    function = _object(
        {"type": {"const": "function"}, "name": _STRING}, {"description": {}, "parameters": {"type": "object"}}
    )
    form = [
        _NULL,
        _object({"type": {"enum": ["text", "json_object"]}}),
        _object({"type": {"const": "json_schema"}, "schema": {"type": "object"}}),
    ]
    names = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stream", "max_thinking_tokens")
    return {
        **{name: _SHARED[name] for name in names},
        "instructions": _optional("string", description="The system message"),
        "max_output_tokens": _MAX_TOKENS,
        "tools": _optional("array", items=function, maxItems=MAX_TOOLS),
        "tool_choice": {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                _object({"type": {"const": "function"}, "name": _STRING}),
            ]
        },
        "parallel_tool_calls": _optional("boolean", default=True),
        "text": {"anyOf": [_NULL, _object({}, {"format": {"anyOf": form}})]},
        "reasoning": {"anyOf": [_NULL, _object({}, {"effort": {"enum": [*REASONING_EFFORTS, None]}})]},
    }


def _completion_request() -> Schema:
    is_text = {"anyOf": [_STRING, _array(_STRING)]}
    generates = {"anyOf": [_NULL, {"type": "integer", "minimum": 1}]}
    nothing_streams = {"echo": _TRUE, "stream": {"enum": [False, None]}}
    rules = [
        _OPTIONS_OF_STREAMS,
        _unless({"suffix": {"enum": ["", None]}}, {"prompt": is_text}),
        {"anyOf": [{"properties": {"max_tokens": generates}}, {"properties": nothing_streams, "required": ["echo"]}]},
    ]
    return _object({"prompt": _prompts(MAX_PROMPTS)}, _completion_fields(), rules)


def _completion_fields() -> Schema:
    return {
        **_SHARED,
        **_unused(),
        "max_tokens": _MAX_TOKENS | {"minimum": 0},
        "suffix": _optional("string", description="What follows the text to write, for models that fill in the middle"),
        "echo": _optional("boolean", default=False),
        "best_of": _optional("integer", minimum=1, maximum=MAX_CHOICES, description="Choices to try; n are given"),
        "logprobs": _optional("integer", minimum=0, maximum=MAX_LOGPROBS),
    }


def _embedding_fields() -> Schema:
    return {
        "model": _SHARED["model"],
        "encoding_format": {"enum": ["float", "base64", None]},
        "dimensions": _ref("Dimensions") | {"description": "The size of the vectors, which is the model's own"},
        "pooling": {"enum": ["mean", "last", None], "description": "The mean of all tokens, or the last one's state"},
        "normalize": _optional("boolean", default=True, description="Vectors have length 1"),
    }


def _infill_fields() -> Schema:
    return {
        **{name: rule for name, rule in _SHARED.items() if name not in ("model", "n", "repetition_penalty")},
        "input_prefix": _optional("string"),
        "input_suffix": _optional("string"),
        "input_extra": _optional("array", items=_object({"text": _STRING}, {"filename": _STRING})),
        "prompt": _optional("string", description="What the answer begins with"),
        "n": {"enum": [1, None]},
        "n_predict": _optional("integer", minimum=-_HIGHEST, maximum=_HIGHEST, default=128),
        "repeat_penalty": _SHARED["repetition_penalty"],
    }


def _message_requests() -> Schema:
    """Return what Anthropic's endpoints take."""
    text = _object({"type": {"const": "text"}, "text": _STRING})
    texts = {"anyOf": [_STRING, _array(text)]}
    result = _object({"type": {"const": "tool_result"}}, {"content": {"anyOf": [_NULL, *texts["anyOf"]]}})
    call = _object({"type": {"const": "tool_use"}, "name": _STRING, "input": {"type": "object"}})
    thought = _object({"type": {"enum": ["thinking", "redacted_thinking"]}})
    turn = {
        "anyOf": [
            _object({"role": {"const": role}, "content": {"anyOf": [_STRING, _array({"anyOf": blocks})]}})
            for role, blocks in (("user", [text, result]), ("assistant", [text, call, thought]))
        ]
    }
    tool = _object(
        {"name": _STRING, "input_schema": {"type": "object"}},
        {"description": {}, "type": {"enum": ["custom", None]}},
    )
    thinking = ["enabled", "disabled", "adaptive", "between_tools"]
    conversation = {
        "model": _SHARED["model"],
        "system": {"anyOf": [*texts["anyOf"], _NULL]},
        "tools": _optional("array", items=tool, maxItems=MAX_TOOLS),
        "tool_choice": {"anyOf": [{"type": "null"}, _object({"type": {"enum": ["auto", "none", "any", "tool"]}})]},
        "thinking": {"anyOf": [{"type": "null"}, _object({"type": {"enum": thinking}})]},
    }
    settings = {
        "stop_sequences": _SHARED["stop"],
        **{name: _SHARED[name] for name in ("temperature", "top_p", "top_k", "stream")},
    }
    required = {"messages": _array(turn, minItems=1)}
    return {
        "CountRequest": _object(required, conversation),
        "MessageRequest": _object(
            required | {"max_tokens": _INTEGER | {"minimum": 1, "maximum": _HIGHEST}}, conversation | settings
        ),
    }


def _answers() -> Schema:
    message = _object(
        {"role": {"const": "assistant"}, "content": _optional("string")},
        {"reasoning_content": _STRING, "refusal": {"type": "null"}, "tool_calls": _array({"type": "object"})},
    )
    model = {"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _STRING}
    reasons = ["stop", "length", "loop"]
    numbers = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "loop_penalty"), _NUMBER)
    defaults = _object({**numbers, "top_k": _INTEGER, "source": _STRING})
    error = {"message": _STRING, "type": _STRING, "param": _optional("string"), "code": _optional("string")}
    return {
        "ChatCompletion": _completion("chat.completion", {"message": message}, [*reasons, "tool_calls"]),
        "Completion": _completion("text_completion", {"text": _STRING}, reasons),
        "Embeddings": _object({
            "object": {"const": "list"},
            "data": _array(_object({"index": _INTEGER, "embedding": {"type": ["array", "string"]}})),
            "model": _STRING,
            "usage": _object({"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}),
        }),
        "Infill": _object({"content": _STRING, "stop": {"const": True}}, {"tokens_predicted": _INTEGER}),
        "Model": _object(
            model, {"root": _STRING, "max_model_len": _INTEGER, "device": _STRING, "sampling_defaults": defaults}
        ),
        "ModelList": _object({"object": {"const": "list"}, "data": _array(_ref("Model"))}),
        "Tokens": _object(
            {"tokens": _array({"type": ["integer", "object"]}), "count": _INTEGER},
            {"max_model_len": _INTEGER, "token_strs": _array(_STRING)},
        ),
        "Text": _object({"prompt": _STRING, "content": _STRING}),
        "TokenizerInfo": _object({"vocab_size": _INTEGER, "max_model_len": _INTEGER}),
        "Health": _object({"status": _STRING}, {"model": _STRING}),
        "Response": _object({
            "id": _STRING,
            "object": {"const": "response"},
            "created_at": _INTEGER,
            "model": _STRING,
            "status": {"enum": ["completed", "incomplete"]},
            "incomplete_details": _optional("object"),
            "output": _array(_object({"id": _STRING, "type": {"enum": ["message", "reasoning", "function_call"]}})),
            "usage": _object(dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), _INTEGER)),
        }),
        "Message": _object({
            "id": _STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _STRING,
            "content": _array(_object({"type": {"enum": ["text", "thinking", "tool_use"]}})),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": _optional("string"),
            "usage": _object({"input_tokens": _INTEGER, "output_tokens": _INTEGER}),
        }),
        "Count": _object({"input_tokens": _INTEGER}),
        "Error": _object({"error": _object(error)}),
        "MessageError": _object(
            {"type": {"const": "error"}, "error": _object({"type": _STRING, "message": _STRING})}
        ),
    }


def _completion(kind: str, content: Schema, reasons: list[str]) -> Schema:
    choice = {"index": _INTEGER, **content, "logprobs": _optional("object"), "finish_reason": {"enum": reasons}}
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _INTEGER)
    required = {
        "id": _STRING,
        "object": {"const": kind},
        "created": _INTEGER,
        "model": _STRING,
        "choices": _array(_object(choice)),
        "usage": _object({**counts, "prompt_tokens_details": _object({"cached_tokens": _INTEGER})}),
    }
    return _object(required, {"system_fingerprint": _STRING})
