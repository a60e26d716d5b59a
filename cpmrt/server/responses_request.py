"""Translates requests of OpenAI's Responses API into chats, which the rest of the server knows."""

from __future__ import annotations

from typing import Any

from cpmrt.server.answer_form import FORM_FIELDS
from cpmrt.server.errors import invalid, unsupported
from cpmrt.server.json_body import Fields, checked_text, shown
from cpmrt.server.schema import check_role
from cpmrt.server.unused_fields import REFUSED_IN_RESPONSES, USE_CHATS, check_unused
from cpmrt.text.messages import arguments_in

_SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "loop_repeats", "loop_penalty",
    "max_thinking_tokens", "parallel_tool_calls", "chat_template_kwargs", "allow_special_tokens", *FORM_FIELDS,
)  # fmt: skip
"""Fields that chats have under the same names."""
CHAT_NAMES = {
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    r"response_format\.json_schema(\.schema)?": "text.format.schema",
    "response_format": "text.format",
    r"(tools\[\d+\])\.function": r"\1",
    r"tool_choice\.allowed_tools": "tool_choice",
}
"""Patterns of the names of fields in chats -> their names in this API."""
TEXT_PARTS = ("input_text", "output_text", "text")
"""The types of the parts of a message that have a field `text`; those of the type `refusal` have one of that name."""


def chat_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of the chat that a request amounts to. Raises ApiError 400."""
    fields = Fields(body)
    check_unused(fields, REFUSED_IN_RESPONSES)
    if fields.boolean("background"):
        raise unsupported("background", "wait for the answer, or stream it")
    if "message.output_text.logprobs" in (fields.array("include") or []):
        raise unsupported("include", USE_CHATS)
    chat = {name: body[name] for name in _SAME if name in body}
    chat["messages"] = _messages(fields)
    chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.array("tools") or [])] or None
    chat["tool_choice"] = _tool_choice(fields.raw("tool_choice"))
    chat["max_tokens"] = fields.integer("max_output_tokens")
    reasoning, text = fields.object("reasoning"), fields.object("text")
    chat["reasoning_effort"] = reasoning.string("effort") if reasoning else None
    chat["response_format"] = _format(text.object("format")) if text else None
    return chat


def _messages(fields: Fields) -> list[dict[str, Any]]:
    instructions, given = fields.string("instructions"), fields.raw("input")
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": checked_text(instructions, "instructions")})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": checked_text(given, "input")}]
    if not isinstance(given, list) or not given:
        raise invalid("input", f"expected a text or an array of items, got {shown(given)}")
    for index, item in enumerate(given):
        _add(messages, item, f"input[{index}]")
    if not messages:
        raise invalid("input", "expected a message, a call or its output, got reasoning only")
    return messages


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Add an item to the messages; calls that follow each other go into one message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        role = check_role(item.get("role"), where)
        messages.append({"role": role, "content": _content(item.get("content"), f"{where}.content")})
    elif kind == "function_call":
        call = {"id": item.get("call_id"), "type": "function", "function": _function(Fields(item, where))}
        if not (messages and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind != "reasoning":
        raise unsupported(f"{where}.type", "use message, function_call, function_call_output or reasoning")


def _function(item: Fields) -> dict[str, Any]:
    """Return the name and the arguments of a call."""
    name, arguments = item.string("name"), item.raw("arguments")
    if name is None:
        raise invalid(item.name("name"), f"expected the name of a function, got {shown(name)}")
    if isinstance(arguments, str) or arguments is None:
        arguments = arguments_in(arguments or "{}")
    if not isinstance(arguments, dict):
        raise invalid(item.name("arguments"), f"expected a JSON object in a string, got {shown(item.raw('arguments'))}")
    return {"name": name, "arguments": arguments}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return checked_text(content, where)
    texts = []
    for index, part in enumerate(content if isinstance(content, list) else [None]):
        kind = part.get("type") if isinstance(part, dict) else None
        name = "text" if kind in TEXT_PARTS else "refusal"
        text = part.get(name) if kind in (*TEXT_PARTS, "refusal") else None
        if not isinstance(text, str):
            got = shown(kind) if isinstance(part, dict) else shown(content)
            raise invalid(f"{where}[{index}]", f"expected text, got {got}")
        texts.append(checked_text(text, f"{where}[{index}].{name}"))
    return "".join(texts)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise unsupported(where, 'only tools of the type "function"')
    return {"type": "function", "function": {name: tool[name] for name in tool if name not in ("type", "strict")}}


def _tool_choice(choice: Any) -> Any:
    """Return the choice as chats have it: a function's name, and the allowed tools, stand in an object of their own
    there.

    "auto" is what no choice means, and may be said without tools here.
    """
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        named = [_tool_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return None if choice == "auto" else choice


def _format(wanted: Fields | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    kind = wanted.string("type")
    if kind == "json_schema":
        return {"type": kind, "json_schema": {"schema": wanted.mapping("schema")}}
    return {"type": kind}
