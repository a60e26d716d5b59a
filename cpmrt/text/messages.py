"""Chat messages and tools as callers hand them in: checked, and copied into plain data.

Templates are untrusted, so they get no object of the caller's, only copies made of JSON's own types.
"""

from __future__ import annotations

from cpmrt.errors import RequestError, quoted

_MAX_DEPTH = 64


def checked_messages(messages: object) -> list[dict[str, object]]:
    """Messages of a chat, each with a `role` and a `content`; text parts are joined to one string, as they are.

    A message with `tool_calls` may lack the content. Keys with the value None are left out, as Hugging Face does:
    templates test for absence, and would write "None". Raises RequestError with index and field.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages", expected="a list of at least one message", actual=quoted(messages))
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def checked_tools(tools: object) -> list[dict[str, object]] | None:
    """Tools as JSON schema functions. Raises RequestError with the index."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise RequestError("tools", expected="a list of JSON schema functions", actual=quoted(tools))
    return [_plain_object(tool, f"tools[{i}]", "a JSON schema function (a dict)") for i, tool in enumerate(tools)]


def plain(value: object, where: str, depth: int = 0) -> object:
    """A copy made of None, bool, int, float, str, list and dict. Raises RequestError naming what does not fit."""
    if depth > _MAX_DEPTH:
        raise RequestError(where[:200], expected=f"at most {_MAX_DEPTH} levels of nesting", actual="more")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(where[:200], expected="strings as keys", actual=quoted(key))
        return {str.__str__(key): plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    raise RequestError(where[:200], expected="JSON data", actual=type(value).__name__)


def _checked_message(message: object, where: str) -> dict[str, object]:
    copy = _plain_object(message, where, "a dict with role and content")
    checked = {key: value for key, value in copy.items() if value is not None}
    if not isinstance(checked.get("role"), str):
        raise RequestError(f"{where}.role", expected="a string", actual=quoted(checked.get("role")))
    calls = checked.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise RequestError(f"{where}.tool_calls", expected="a list of dicts", actual=quoted(calls))
    content = checked.get("content")
    if isinstance(content, list):
        checked["content"] = "".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif content is None and not calls:
        raise RequestError(f"{where}.content", expected="a string (or None beside tool_calls)", actual="None")
    elif not (content is None or isinstance(content, str)):
        raise RequestError(f"{where}.content", expected="a string or a list of text parts", actual=quoted(content))
    return checked


def _part_text(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError(where, expected='a part {"type": "text", "text": ...}', actual=quoted(part))
    return text


def _plain_object(value: object, where: str, expected: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise RequestError(where, expected=expected, actual=quoted(value))
    copy = plain(value, where)
    assert isinstance(copy, dict)
    return copy
