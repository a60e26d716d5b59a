"""Checks the messages of a chat, and marks the untrusted text in them.

Templates are untrusted too and get none of the caller's objects, only these copies, which consist of JSON types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cpmrt.errors import RequestError, quoted
from cpmrt.text.markers import ANSWER_MARKERS
from cpmrt.text.marks import Marks
from cpmrt.yielding_json import Decoders, encoded

_DECODERS = Decoders()
_MAX_DEPTH = 64
SYSTEM_ROLES = ("system", "developer")
"""The roles that speak for the operator: their messages are trusted, and other chats may begin with them too."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def checked_messages(messages: object, sources: Sequence[str] = ()) -> list[dict[str, object]]:
    """Check and copy the messages of a chat, each with a `role` and a `content`; text parts are joined to one string.

    A role must be one of the usual ones or stand as a quoted word in one of the templates' `sources`.

    A message with `tool_calls` may lack the content. The calls' arguments, which the OpenAI API has as JSON in a
    string, become objects, as templates expect. Keys with the value None are left out, as Hugging Face does: templates
    test whether a key is there, and would write "None". Raises RequestError with index and field.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages", expected="a list of at least one message", actual=quoted(messages))
    checked = [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for i, message in enumerate(checked):
        role = message["role"]
        if role not in _ROLES and not any(f"{quote}{role}{quote}" in source for quote in "'\"" for source in sources):
            raise RequestError(f"messages[{i}].role", expected=" | ".join(_ROLES), actual=quoted(role))
    return checked


def checked_tools(tools: object) -> list[dict[str, object]] | None:
    """Check and copy tools, which are JSON schema functions. Raises RequestError with the index."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise RequestError("tools", expected="a list of JSON schema functions", actual=quoted(tools))
    return [_plain_object(tool, f"tools[{i}]", "a JSON schema function (a dict)") for i, tool in enumerate(tools)]


def marked_variables(variables: dict[str, object], marks: Marks | None) -> dict[str, object]:
    """Return the variables of a template with the untrusted text marked: messages by their role, and documents."""
    if marks is None:
        return variables
    messages = variables["messages"]
    assert isinstance(messages, list)
    marked = [_marked_message(message, marks) for message in messages]
    return variables | {"messages": marked, "documents": marks.put(variables["documents"])}


def _marked_message(message: dict[str, object], marks: Marks) -> dict[str, object]:
    role = message["role"]
    if role in SYSTEM_ROLES:
        return message
    if role == "assistant":
        marked = marks.put_on_tokens(message, but=ANSWER_MARKERS)
    else:
        marked = marks.put(message) | {"role": marks.put_on_tokens(role)}
    assert isinstance(marked, dict)
    return marked


def other_forms(messages: object) -> Iterator[list[dict[str, object]]]:
    """Yield the messages as some templates need them: first with "" for a missing content, then also with the arguments
    of tool calls as JSON in a string, which some templates concatenate with other text."""
    assert isinstance(messages, list)
    complete = [{"content": "", **message} for message in messages]
    if not all("content" in message for message in messages):
        yield complete
    if any(message.get("tool_calls") for message in messages):
        yield [_with_texts(message) for message in complete]


def _with_texts(message: dict[str, Any]) -> dict[str, object]:
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            call["function"] = {**function, "arguments": encoded(function["arguments"], ensure_ascii=False)}
    return {**message, "tool_calls": calls} if calls else message


def plain(value: object, where: str, depth: int = 0) -> object:
    """Copy a value that consists of JSON types (a tuple becomes a list). Raises RequestError naming what is no JSON."""
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
    if calls:
        checked["tool_calls"] = [_with_object(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    content = checked.get("content")
    if isinstance(content, list):
        checked["content"] = "".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif content is None and not calls:
        raise RequestError(f"{where}.content", expected="a string (or None beside tool_calls)", actual="None")
    elif not (content is None or isinstance(content, str)):
        raise RequestError(f"{where}.content", expected="a string or a list of text parts", actual=quoted(content))
    check_unicode(checked.get("content"), f"{where}.content")
    return checked


def check_unicode(content: object, where: str) -> None:
    """Raise RequestError for a text that no tokenizer takes."""
    try:
        str(content).encode()
    except UnicodeEncodeError as error:
        actual = f"half of a surrogate pair (character {error.start})"
        raise RequestError(where, expected="valid Unicode", actual=actual) from None


def arguments_in(text: str) -> dict[str, object] | None:
    """Return the arguments of a tool call, which the OpenAI API has as JSON in a string; None if it holds no object."""
    try:
        arguments = _DECODERS.decode(text)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _with_object(call: dict[str, object], where: str) -> dict[str, object]:
    """Return a tool call with its arguments parsed; unchanged if they are not a string that holds a JSON object."""
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, dict) else None
    arguments = arguments_in(text) if isinstance(text, str) else None
    if not isinstance(function, dict) or arguments is None:
        return call
    return {**call, "function": {**function, "arguments": plain(arguments, f"{where}.function.arguments")}}


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
