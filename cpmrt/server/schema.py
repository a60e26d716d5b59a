"""Requests of the API as typed values. A known field that is not supported raises; an unknown one is ignored."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from cpmrt.config.sampling import MAX_LOGPROBS
from cpmrt.server.errors import ApiError, invalid, unsupported
from cpmrt.server.fields import Fields, shown
from cpmrt.server.sampling import Wanted, read_wanted

MAX_PROMPTS = 128
_ROLES = ("system", "developer", "user", "assistant", "tool")
_COMPLETION_DEFAULT_TOKENS = 16
_RESERVED_TEMPLATE_NAMES = {"messages", "tools", "add_generation_prompt", "self"}

# Field -> the values that ask for nothing special.
_NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {"suffix": ("",), "best_of": (1,)}


@dataclass(frozen=True)
class StreamOptions:
    """Whether the answer is streamed, and with a last chunk for the usage."""

    is_on: bool
    include_usage: bool


@dataclass(frozen=True)
class ChatRequest:
    """POST /v1/chat/completions. `tools` are empty where the model may not call any."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]
    wanted: Wanted
    logprobs: int | None
    stream: StreamOptions


@dataclass(frozen=True)
class CompletionRequest:
    """POST /v1/completions. `prompts` are texts or token ids; `logprobs` None: not asked for."""

    prompts: list[str | list[int]]
    echo: bool
    wanted: Wanted
    logprobs: int | None
    stream: StreamOptions


def read_chat(body: dict[str, Any], model: str) -> ChatRequest:
    """Raises ApiError or RequestError naming the field."""
    fields = Fields(body)
    _check_model(fields, model)
    _refuse_unsupported(fields, _NEUTRAL_CHAT)
    messages = fields.array("messages")
    if not messages:
        raise invalid("messages", "expected an array of at least one message")
    logprobs = _chat_logprobs(fields)
    template_kwargs = fields.mapping("chat_template_kwargs") or {}
    for name in _RESERVED_TEMPLATE_NAMES & set(template_kwargs):
        raise invalid(f"chat_template_kwargs.{name}", "this variable is the server's own")
    return ChatRequest(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        tools=_tools(fields),
        template_kwargs=template_kwargs,
        wanted=read_wanted(fields, _chat_max_tokens(fields), 0 if logprobs is None else max(1, logprobs)),
        logprobs=logprobs,
        stream=_stream_options(fields),
    )


def read_completion(body: dict[str, Any], model: str) -> CompletionRequest:
    """Raises ApiError or RequestError naming the field."""
    fields = Fields(body)
    _check_model(fields, model)
    _refuse_unsupported(fields, _NEUTRAL_COMPLETION)
    max_tokens = fields.integer("max_tokens")
    logprobs = fields.integer("logprobs")
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise invalid("logprobs", f"expected 0 to {MAX_LOGPROBS}, got {logprobs}")
    echo = bool(fields.boolean("echo"))
    if echo and logprobs is not None:
        raise unsupported("logprobs", "not together with echo, as the prompt's own are not computed")
    count = 0 if logprobs is None else max(1, logprobs)
    wanted = read_wanted(fields, _COMPLETION_DEFAULT_TOKENS if max_tokens is None else max_tokens, count)
    return CompletionRequest(_prompts(fields.raw("prompt")), echo, wanted, logprobs, _stream_options(fields))


def _check_model(fields: Fields, served: str) -> None:
    name = fields.string("model")
    if name is not None and name != served:
        message = f"the model {shown(name)} does not exist here; this server has {served!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


def _refuse_unsupported(fields: Fields, neutral: dict[str, tuple[Any, ...]]) -> None:
    for name, values in neutral.items():
        value = fields.raw(name)
        if value is not None and value not in values:
            raise unsupported(name, "leave it out")


def _stream_options(fields: Fields) -> StreamOptions:
    is_on = bool(fields.boolean("stream"))
    options = fields.object("stream_options")
    if options is None:
        return StreamOptions(is_on, include_usage=False)
    if not is_on:
        raise invalid("stream_options", "only together with stream")
    return StreamOptions(is_on, bool(options.boolean("include_usage")))


def _chat_max_tokens(fields: Fields) -> int | None:
    older, newer = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if older is not None and newer is not None and older != newer:
        raise invalid("max_tokens", "contradicts max_completion_tokens; give one of them")
    return older if newer is None else newer


def _chat_logprobs(fields: Fields) -> int | None:
    wanted, count = fields.boolean("logprobs"), fields.integer("top_logprobs")
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise invalid("top_logprobs", f"expected 0 to {MAX_LOGPROBS}, got {count}")
    if count and not wanted:
        raise invalid("top_logprobs", "only together with logprobs: true")
    return (count or 0) if wanted else None


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(where, f"expected an object with role and content, got {shown(message)}")
    role = message.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"expected {', '.join(_ROLES)}, got {shown(role)}")
    if message.get("function_call") is not None:
        raise unsupported(f"{where}.function_call", "use tool_calls")
    copy = {**message, "role": "system" if role == "developer" else role}
    if message.get("tool_calls") is not None:
        copy["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return copy


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Templates want the arguments as an object; the API has them as JSON in a string."""
    checked = []
    for index, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{where}[{index}]", "expected an object with a function, which has name and arguments")
        arguments = function.get("arguments") or "{}"
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise invalid(f"{where}[{index}].function.arguments", "expected a JSON object in a string")
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _tools(fields: Fields) -> list[dict[str, Any]]:
    tools, choice = fields.array("tools") or [], fields.raw("tool_choice")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"tools[{index}]", 'expected {"type": "function", "function": {"name": ...}}')
        if not isinstance(function.get("parameters", {}), dict):
            raise invalid(f"tools[{index}].function.parameters", "expected a JSON schema (an object)")
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", 'only "auto" and "none"; no model can be made to call a tool yet')
    if choice == "auto" and not tools:
        raise invalid("tool_choice", "only together with tools")
    return [] if choice == "none" else tools


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], (str, list))):
        value = [value]
    if not isinstance(value, list) or not value:
        raise invalid("prompt", "expected a string, an array of token ids, or an array of either")
    if len(value) > MAX_PROMPTS:
        raise invalid("prompt", f"expected at most {MAX_PROMPTS} prompts, got {len(value)}")
    for prompt in value:
        is_ids = isinstance(prompt, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in prompt)
        if not isinstance(prompt, str) and not is_ids:
            raise invalid("prompt", "expected a string, an array of token ids, or an array of either")
    return value
