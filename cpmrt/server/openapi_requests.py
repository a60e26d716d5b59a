"""The schemas of the bodies of requests in the OpenAPI document."""

from __future__ import annotations

from cpmrt.config.sampling import MAX_LOGPROBS
from cpmrt.server.embeddings import MAX_INPUTS
from cpmrt.server.openapi_types import (
    INTEGER,
    NULL,
    STRING,
    TRUE,
    Schema,
    array,
    either,
    object_of,
    optional,
    ref,
    unless,
)
from cpmrt.server.responses_request import TEXT_PARTS
from cpmrt.server.schema import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
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

_HIGHEST = 2**64 - 1
_TOKEN_IDS = array(ref("TokenId"), minItems=1)
_MAX_TOKENS = optional(
    "integer", minimum=1, maximum=_HIGHEST, description="Default: until the model ends or the context is full"
)
_OWN = "Default: the model's own, see sampling_defaults in /v1/models"
_SHARED: Schema = {
    "model": ref("ModelName") | {"description": "A name in /v1/models, or nothing"},
    "temperature": optional("number", minimum=0, maximum=1e6, description=_OWN),
    "top_p": optional("number", minimum=0, maximum=1, description=_OWN),
    "top_k": optional("integer", minimum=-_HIGHEST, maximum=2**31 - 1, description=_OWN),
    "min_p": optional("number", minimum=0, maximum=1, description=_OWN),
    "repetition_penalty": optional("number", minimum=0.001, maximum=1000, description=_OWN),
    "presence_penalty": optional("number", minimum=-100, maximum=100, default=0),
    "frequency_penalty": optional("number", minimum=-100, maximum=100, default=0),
    "loop_repeats": {
        "anyOf": [NULL, {"const": 0}, {"type": "integer", "minimum": 2, "maximum": 1000}],
        "default": 0,
        "description": "End an answer that repeats itself so often",
    },
    "loop_penalty": optional(
        "number", minimum=1, maximum=1000, description=f"First raise the repetition penalty of a loop to this. {_OWN}"
    ),
    "max_thinking_tokens": optional(
        "integer", minimum=1, maximum=2**31 - 1, description="Close a thought after so many tokens"
    ),
    "response_format": {
        "description": "What the answer must look like",
        "anyOf": [
            NULL,
            object_of({"type": {"const": "text"}}),
            object_of({"type": {"const": "json_object"}}, {"schema": optional("object")}),
            object_of({"type": {"const": "json_schema"}, "json_schema": object_of({"schema": {"type": "object"}})}),
        ],
    },
    "structured_outputs": optional("object", description="With one of json, regex, choice, grammar, json_object"),
    "json_schema": optional("object", description="As guided_json"),
    "regex": optional("string", description="As guided_regex"),
    "grammar": optional("string", description="As guided_grammar"),
    "ebnf": optional("string", description="As guided_grammar"),
    "guided_json": {"anyOf": [optional("object"), {"type": "string"}], "description": "A JSON schema of the answer"},
    "guided_regex": optional("string", minLength=1, description="A regular expression that the answer matches"),
    "guided_choice": optional("array", items={"type": "string", "minLength": 1}, minItems=1),
    "guided_grammar": optional("string", minLength=1, description="A grammar of the answer, of Lark or GBNF"),
    "logit_bias": optional(
        "object",
        propertyNames={"pattern": "^[0-9]{1,9}$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        maxProperties=MAX_LOGIT_BIAS,
    ),
    "n": optional("integer", minimum=1, maximum=MAX_CHOICES, default=1),
    "stop": {
        "anyOf": [optional("string", minLength=1), array({"type": "string", "minLength": 1}, maxItems=MAX_STOP)],
        "description": f"At most {MAX_STOP_BYTES} bytes together",
    },
    "stop_token_ids": optional("array", items=ref("TokenId"), maxItems=MAX_STOP_TOKEN_IDS),
    "ignore_eos": optional("boolean", default=False),
    "seed": optional("integer", minimum=-_HIGHEST, maximum=_HIGHEST),
    "stream": optional("boolean", default=False),
    "stream_options": {
        "anyOf": [
            NULL,
            object_of({}, {name: optional("boolean") for name in ("include_usage", "continuous_usage_stats")}),
        ]
    },
}
_OF_TEMPLATES = ("tools", "tool_choice", "reasoning_effort", "chat_template_kwargs", "allow_special_tokens")
"""Fields of chats that say what the template gets besides the messages."""
_ARGUMENTS = optional("string", "object", description="A JSON object, or a string with one")
_REFUSAL = object_of({"type": {"const": "refusal"}, "refusal": STRING})
"""A part of a message of the assistant."""
_OPTIONS_OF_STREAMS = unless({"stream_options": NULL}, {"stream": TRUE})


def _unused() -> Schema:
    return {name: optional(kind, description="Accepted, without effect") for name, kind in HARMLESS.items()}


def request_schemas() -> Schema:
    chat, message = _chat_fields(), _chat_message()
    messages = array(message, minItems=1)
    tool_choice = _needs_tools("none")
    tokenize = {
        "prompt": optional("string"),
        "content": optional("string"),
        **{name: optional("boolean") for name in ("add_special_tokens", "add_special")},
        "parse_special": optional("boolean", default=True),
        "messages": {"anyOf": [NULL, messages]},
        "add_generation_prompt": optional("boolean", default=True),
        "return_token_strs": optional("boolean", default=False),
        "with_pieces": optional("boolean", default=False),
        **{name: chat[name] for name in _OF_TEMPLATES},
    }
    return {
        "ChatRequest": object_of(
            {"messages": messages},
            chat,
            [
                _OPTIONS_OF_STREAMS,
                unless({"top_logprobs": {"enum": [0, None]}}, {"logprobs": TRUE}),
                tool_choice,
            ],
        ),
        "ResponsesRequest": object_of(
            {"input": {"anyOf": [STRING, array(_response_item(), minItems=1)]}},
            _responses_fields(chat),
            [_needs_tools("none", "auto")],
        ),
        "CompletionRequest": _completion_request(),
        **_message_requests(),
        "EmbeddingRequest": object_of({"input": _prompts(MAX_INPUTS)}, _embedding_fields()),
        "InfillRequest": object_of({}, _infill_fields(), [_OPTIONS_OF_STREAMS]),
        "TokenizeRequest": object_of(
            {}, tokenize, [either({"prompt": STRING}, {"content": STRING}, {"messages": messages}), tool_choice]
        ),
        "DetokenizeRequest": object_of({"tokens": array(ref("TokenId"))}),
    }


def _needs_tools(*others: str) -> Schema:
    """Return the rule that a tool_choice needs tools, unless it is null or one of `others`."""
    return unless({"tool_choice": {"enum": [*others, None]}}, {"tools": array({}, minItems=1)})


def _prompts(most: int) -> Schema:
    """Return the schema of one prompt or several, at most `most`, each a text or token ids."""
    several = array({"anyOf": [STRING, _TOKEN_IDS]}, minItems=1, maxItems=most)
    return {"anyOf": [STRING, _TOKEN_IDS, several]}


def _chat_message() -> Schema:
    part = object_of({"type": {"const": "text"}, "text": STRING})
    call = object_of({"function": object_of({"name": STRING}, {"arguments": _ARGUMENTS})})
    text, own_text = {"anyOf": [STRING, array(part)]}, {"anyOf": [STRING, array({"anyOf": [part, _REFUSAL]})]}
    is_own = {"role": {"const": "assistant"}}
    return object_of(
        {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}},
        {
            "content": {"anyOf": [NULL, *own_text["anyOf"]]},
            "refusal": optional("string"),
            "tool_calls": optional("array", items=call),
            "tool_call_id": {},
            "function_call": NULL,
        },
        [
            either({"content": own_text}, {"tool_calls": array({}, minItems=1)}, {**is_own, "refusal": STRING}),
            unless({"content": {"anyOf": [NULL, *text["anyOf"]]}}, is_own),
        ],
    )


def _chat_fields() -> Schema:
    function = object_of({"name": STRING}, {"description": {}, "parameters": optional("object")})
    tool = object_of({"type": {"const": "function"}, "function": function})
    called = object_of({"type": {"const": "function"}, "function": object_of({"name": STRING})})
    return {
        **_SHARED,
        **_unused(),
        "max_tokens": _MAX_TOKENS,
        "max_completion_tokens": _MAX_TOKENS,
        "logprobs": optional("boolean"),
        "top_logprobs": optional("integer", minimum=0, maximum=MAX_LOGPROBS),
        "tools": optional("array", items=tool, maxItems=MAX_TOOLS),
        "tool_choice": {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                called,
                object_of({"type": {"const": "allowed_tools"}, "allowed_tools": _allowed_tools(called)}),
            ],
        },
        "parallel_tool_calls": optional("boolean", default=True, description="false: the first call alone is given"),
        "reasoning_effort": {
            "enum": [*REASONING_EFFORTS, None],
            "description": "none and minimal: no thoughts, others: thoughts, if the model's template can choose",
        },
        "chat_template_kwargs": optional(
            "object",
            propertyNames={"not": {"enum": sorted(RESERVED_TEMPLATE_NAMES)}},
            maxProperties=MAX_TEMPLATE_VARIABLES,
            description="Variables of the template, as enable_thinking",
        ),
        "allow_special_tokens": optional(
            "boolean", default=False, description="Special tokens in messages of users and tools count as such"
        ),
    }


def _allowed_tools(called: Schema, **others: Schema) -> Schema:
    """Return the schema of a choice among some of the tools, each named as in `called`."""
    return object_of({**others, "mode": {"enum": ["auto", "required"]}, "tools": array(called, minItems=1)})


def _response_item() -> Schema:
    """Return the schema of an item of input: messages, calls, their results, and thoughts, which are passed over."""
    part = object_of({"type": {"enum": sorted(TEXT_PARTS)}, "text": STRING})
    text = {"anyOf": [STRING, array({"anyOf": [part, _REFUSAL]})]}
    roles = {"enum": ["system", "developer", "user", "assistant"]}
    return {
        "anyOf": [
            object_of({"role": roles, "content": text}, {"type": {"const": "message"}}),
            object_of({"type": {"const": "function_call"}, "name": STRING}, {"arguments": _ARGUMENTS}),
            object_of({"type": {"const": "function_call_output"}, "output": text}),
            object_of({"type": {"const": "reasoning"}}),
        ]
    }


def _responses_fields(chat: Schema) -> Schema:
    function = object_of(
        {"type": {"const": "function"}, "name": STRING}, {"description": {}, "parameters": optional("object")}
    )
    called = object_of({"type": {"const": "function"}, "name": STRING})
    form = [
        NULL,
        object_of({"type": {"enum": ["text", "json_object"]}}),
        object_of({"type": {"const": "json_schema"}, "schema": {"type": "object"}}),
    ]
    others = ("n", "response_format", "stream_options")
    return {
        **{name: rule for name, rule in _SHARED.items() if name not in others},
        **_unused(),
        "instructions": optional("string", description="The system message"),
        "max_output_tokens": _MAX_TOKENS,
        "tools": optional("array", items=function, maxItems=MAX_TOOLS),
        "tool_choice": {
            "anyOf": [
                {"enum": ["none", "auto", "required", None]},
                called,
                _allowed_tools(called, type={"const": "allowed_tools"}),
            ]
        },
        "parallel_tool_calls": optional("boolean", default=True),
        "truncation": {"enum": ["disabled", None]},
        "include": optional("array", items={"not": {"const": "message.output_text.logprobs"}}),
        "text": {"anyOf": [NULL, object_of({}, {"format": {"anyOf": form}})]},
        "reasoning": {"anyOf": [NULL, object_of({}, {"effort": {"enum": [*REASONING_EFFORTS, None]}})]},
        **{name: chat[name] for name in ("chat_template_kwargs", "allow_special_tokens")},
    }


def _completion_request() -> Schema:
    is_text = {"anyOf": [STRING, array(STRING)]}
    generates = {"anyOf": [NULL, {"type": "integer", "minimum": 1}]}
    nothing_streams = {"echo": TRUE, "stream": {"enum": [False, None]}}
    rules = [
        _OPTIONS_OF_STREAMS,
        unless({"suffix": {"enum": ["", None]}}, {"prompt": is_text}),
        {"anyOf": [{"properties": {"max_tokens": generates}}, {"properties": nothing_streams, "required": ["echo"]}]},
    ]
    return object_of({"prompt": _prompts(MAX_PROMPTS)}, _completion_fields(), rules)


def _completion_fields() -> Schema:
    return {
        **_SHARED,
        **_unused(),
        "max_tokens": _MAX_TOKENS | {"minimum": 0},
        "suffix": optional("string", description="What follows the text to write, for models that fill in the middle"),
        "echo": optional("boolean", default=False),
        "best_of": optional("integer", minimum=1, maximum=MAX_CHOICES, description="Choices to try; n are given"),
        "logprobs": optional("integer", minimum=0, maximum=MAX_LOGPROBS),
    }


def _embedding_fields() -> Schema:
    return {
        "model": _SHARED["model"],
        **_unused(),
        "encoding_format": {"enum": ["float", "base64", None]},
        "dimensions": ref("Dimensions") | {"description": "The size of the vectors, which is the model's own"},
        "pooling": {"enum": ["mean", "last", None], "description": "The mean of all tokens, or the last one's state"},
        "normalize": optional("boolean", default=True, description="Vectors have length 1"),
    }


def _infill_fields() -> Schema:
    return {
        **{name: rule for name, rule in _SHARED.items() if name not in ("model", "n", "repetition_penalty")},
        "input_prefix": optional("string"),
        "input_suffix": optional("string"),
        "input_extra": optional("array", items=object_of({"text": STRING}, {"filename": STRING})),
        "prompt": optional("string", description="What the answer begins with"),
        "n": {"enum": [1, None]},
        "n_predict": optional("integer", minimum=-_HIGHEST, maximum=_HIGHEST, default=128),
        "repeat_penalty": _SHARED["repetition_penalty"],
    }


def _message_requests() -> Schema:
    """Return the schemas of requests to Anthropic's endpoints."""
    text = object_of({"type": {"const": "text"}, "text": STRING})
    texts = {"anyOf": [STRING, array(text)]}
    result = object_of({"type": {"const": "tool_result"}}, {"content": {"anyOf": [NULL, *texts["anyOf"]]}})
    call = object_of({"type": {"const": "tool_use"}, "name": STRING, "input": {"type": "object"}})
    thought = object_of({"type": {"enum": ["thinking", "redacted_thinking"]}})
    turn = {
        "anyOf": [
            object_of({"role": {"const": role}, "content": {"anyOf": [STRING, array({"anyOf": blocks})]}})
            for role, blocks in (("user", [text, result]), ("assistant", [text, call, thought]))
        ]
    }
    tool = object_of(
        {"name": STRING, "input_schema": {"type": "object"}},
        {"description": {}, "type": {"enum": ["custom", None]}},
    )
    thinking = ["enabled", "disabled", "adaptive", "between_tools"]
    conversation = {
        "model": _SHARED["model"],
        "system": {"anyOf": [*texts["anyOf"], NULL]},
        "tools": optional("array", items=tool, maxItems=MAX_TOOLS),
        "tool_choice": {"anyOf": [NULL, object_of({"type": {"enum": ["auto", "none", "any", "tool"]}})]},
        "thinking": {"anyOf": [NULL, object_of({"type": {"enum": thinking}})]},
    }
    settings = {
        "stop_sequences": _SHARED["stop"],
        **{name: _SHARED[name] for name in ("temperature", "top_p", "top_k", "stream")},
    }
    required = {"messages": array(turn, minItems=1)}
    return {
        "CountRequest": object_of(required, conversation),
        "MessageRequest": object_of(
            required | {"max_tokens": INTEGER | {"minimum": 1, "maximum": _HIGHEST}}, conversation | settings
        ),
    }
