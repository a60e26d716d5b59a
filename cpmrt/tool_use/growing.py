"""Reads the calls of a block that a model is still writing, under a grammar, as far as their arguments are certain.

The arguments are returned as the beginning of the JSON that `Format.read` gives for the whole block, which only grows.
Strings are read as they come, other values when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from cpmrt.tool_use.calls import DECODER, Call, Schemas, as_json, properties_of
from cpmrt.tool_use.formats import HERMES, PYTHON, XML, Format
from cpmrt.tool_use.xml_calls import FUNCTION, PARAM, read_param, typed_value

_HERMES_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"arguments"\s*:\s*\{\s*')
_HERMES_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*')
_PYTHON_HEAD = re.compile(r"(?:\s*```[a-z]*\n)?\s*([\w.]+)\(")
_PYTHON_KEY = re.compile(r"(\w+)=")
_BETWEEN = re.compile(r"\s*,\s*")
_WHOLE = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
"""The longest beginning of a JSON string without an incomplete escape sequence or surrogate pair at its end."""
_BEHIND = frozenset(" \n,)}")
"""Characters that may follow a value. A number without one of them after it may still go on."""
MAX_GROWING = 2**15
"""The most characters of a block that is read again with every piece; longer blocks would take too much time."""
_CDATA, _CDATA_END = "<![CDATA[", "]]>"


class _Value(NamedTuple):
    """The JSON of a value as far as it is certain, and the position after the value if it is complete."""

    text: str
    end: int | None


def growing_calls(form: Format, text: str, schemas: Schemas) -> list[Call]:
    """Return the calls in the text of an open block of this format; the last one's arguments may be incomplete."""
    return list(_READERS[form.start](text, schemas))


def _json_call(text: str, schemas: Schemas) -> Iterator[Call]:
    head = _HERMES_HEAD.match(text)
    if head is not None:
        arguments, _ = _members(text, head.end(), _HERMES_KEY, "}")
        yield Call(_unquoted(head[1]), arguments)


def _python_calls(text: str, schemas: Schemas) -> Iterator[Call]:
    at: int | None = 0
    while at is not None and (head := _PYTHON_HEAD.match(text, at)) is not None:
        arguments, at = _members(text, head.end(), _PYTHON_KEY, ")")
        yield Call(head[1], arguments)


def _xml_call(text: str, schemas: Schemas) -> Iterator[Call]:
    function = FUNCTION.match(text)
    if function is None:
        return
    properties = properties_of(schemas.get(function[1], {}))
    members, at = list[str](), function.end()
    while (head := PARAM.match(text, at)) is not None:
        schema = properties.get(head[1])
        try:
            value, at = read_param(text, head.end(), schema)
        except ValueError:
            is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
            begun = _begun_cdata(text[head.end() :]) if is_text else None
            if begun is not None:
                members.append(f"{as_json(head[1])}: {begun}")
            break
        members.append(f"{as_json(head[1])}: {as_json(typed_value(value, schema))}")
    yield Call(function[1], "{" + ", ".join(members))


def _begun_cdata(text: str) -> str | None:
    """Return the JSON of a string that has begun in CDATA, without the closing quotation mark; None if it is not in
    CDATA."""
    if not text.startswith(_CDATA):
        return None
    body, end, _ = text[len(_CDATA) :].partition(_CDATA_END)
    if end:
        return as_json(body)[:-1]
    held = next((length for length in (2, 1) if body.endswith(_CDATA_END[:length])), 0)
    return as_json(body[: len(body) - held])[:-1]


def _members(text: str, at: int, key: re.Pattern[str], end: str) -> tuple[str, int | None]:
    """Return the JSON of the arguments that begin at `at`, and the position after them if they are complete."""
    members = dict[str, str]()
    while True:
        if text.startswith(end, at):
            return _begun_object(members) + "}", at + len(end)
        between = _BETWEEN.match(text, at) if members else None
        name = key.match(text, between.end() if between else at)
        value = _value(text, name.end()) if name else None
        if name is None or value is None or (members and between is None):
            return _begun_object(members), None
        members.setdefault(as_json(_unquoted(name[1])), value.text)
        if value.end is None:
            return _begun_object(members), None
        at = value.end


def _begun_object(members: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in members.items())


def _value(text: str, at: int) -> _Value | None:
    """Return the JSON value that begins at `at`, None if nothing of it is certain yet."""
    try:
        value, end = DECODER.raw_decode(text, at)
        written = as_json(value)
    except (ValueError, RecursionError):
        if not text.startswith('"', at):
            return None
        begun = _WHOLE.match(text, at + 1)
        return _Value(as_json(_unquoted(begun[0] if begun else ""))[:-1], None)
    may_go_on = isinstance(value, (int, float)) and not isinstance(value, bool) and text[end : end + 1] not in _BEHIND
    return None if may_go_on else _Value(written, end)


def _unquoted(text: str) -> str:
    """Return the string whose JSON has this text between its quotation marks."""
    return str(json.loads(f'"{text}"', strict=False))


_READERS: dict[str, Callable[[str, Schemas], Iterator[Call]]] = {
    HERMES.start: _json_call, PYTHON.start: _python_calls, XML.start: _xml_call,
}  # fmt: skip
