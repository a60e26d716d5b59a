"""Reads the tool calls of MiniCPM5: `<function name="f"><param name="a">1</param></function>`.

The parameters may stand inside `<arguments>`. A value is text with XML entities, or CDATA, in which markers do not
count. A call that does not fit the request's tools is no call: if it names an unknown function, names an unknown
parameter or one twice, or leaves out a required parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from html import unescape
from typing import Any

from cpmrt.tool_use.calls import DECODER, Call, Schemas, as_json, listed_types, properties_of, required_of
from cpmrt.tool_use.parameters import is_open
from cpmrt.tool_use.python_literals import read_literal

FUNCTION = re.compile(r'([^"]+)"\s*>')
PARAM = re.compile(r'\s*<param\s+name="([^"]+)"\s*>')
_VALUE_STOP = re.compile(r"</param>|<!\[CDATA\[")
_CDATA_END = "]]>"
_JSON_TYPES = {
    type(None): ("null",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",),
    list: ("array",), dict: ("object",),
}  # fmt: skip


def read_xml_call(text: str, schemas: Schemas) -> list[Call]:
    """Read a call from the text after `<function name="`, up to the closing tag. Raises ValueError if it is no call."""
    function = FUNCTION.match(text)
    if function is None or function[1] not in schemas:
        raise ValueError("no call of a known function")
    body = text[function.end() :].strip()
    if body.startswith("<arguments>"):
        body = body.removeprefix("<arguments>").removesuffix("</arguments>")
    schema = schemas[function[1]]
    properties = properties_of(schema)
    arguments: dict[str, Any] = {}
    for name, value in _params(body, properties):
        if name in arguments or not (name in properties or not properties or is_open(schema)):
            raise ValueError(f"parameter {name!r} is unknown or given twice")
        arguments[name] = typed_value(value, properties.get(name))
    if missing := required_of(schema) - arguments.keys():
        raise ValueError(f"required parameters are missing: {missing}")
    return [Call(function[1], as_json(arguments))]


def _params(text: str, properties: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and value of each parameter. Raises ValueError if there is anything else between them."""
    at, end = 0, len(text.rstrip())
    while at < end:
        head = PARAM.match(text, at)
        if head is None:
            raise ValueError("no parameter")
        value, at = read_param(text, head.end(), properties.get(head[1]))
        yield head[1], value


def read_param(text: str, at: int, schema: object) -> tuple[str, int]:
    """Return the value that begins at `at`, as text, and the position after its end tag.

    White space around the value is dropped, but not within CDATA, where it may belong to a file's content. Raises
    ValueError if the end is missing.
    """
    plain, parts = list[str](), list[str]()
    while stop := _VALUE_STOP.search(text, at):
        plain.append(unescape(text[at : stop.start()]))
        parts.append(plain[-1])
        if stop[0] == "</param>":
            is_quoted = len(parts) > len(plain) and not "".join(plain).strip()
            return "".join(parts[1::2]) if is_quoted else "".join(parts).strip(), stop.end()
        may_be_json = len(parts) == 1 and not parts[0].strip() and not is_text(schema)
        end = _cdata_end(text, stop.end(), may_be_json=may_be_json)
        if end < 0:
            break
        parts.append(text[stop.end() : end])
        at = end + len(_CDATA_END)
    raise ValueError("a value without its end")


def _cdata_end(text: str, at: int, *, may_be_json: bool) -> int:
    """Return where the CDATA that begins at `at` ends, -1 if it does not. "]]>" within a JSON value does not end it."""
    if may_be_json:
        with suppress(ValueError, RecursionError):
            _, end = DECODER.raw_decode(text, at)
            if text.startswith(_CDATA_END, end):
                return end
    return text.find(_CDATA_END, at)


def typed_value(text: str, schema: object) -> Any:
    """Return a value in the type of its schema. If only strings are allowed it stays text.

    Otherwise it is read as JSON or as a Python literal, if it is one. If strings are one of several types, it stays
    text unless the value read has one of the other types.
    """
    if is_text(schema):
        return text
    types, value = _types(schema), _literal(text)
    return value if "string" not in types or types.intersection(_JSON_TYPES[type(value)]) else text


def is_text(schema: object) -> bool:
    """Whether a schema allows only strings."""
    return _types(schema) == {"string"} or bool(text_choices(schema))


def text_choices(schema: object) -> list[str]:
    """Return the values that a schema lists (`enum`, `const`) if all of them are strings, else []."""
    listed = schema if isinstance(schema, Mapping) else {}
    choices = _list(listed.get("enum", [listed["const"]] if "const" in listed else None))
    return choices if all(isinstance(choice, str) for choice in choices) else []


def _types(schema: object) -> set[str]:
    """Return the JSON types that a schema names, also in `anyOf` and `oneOf`; an empty set if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    types = listed_types(schema)
    for choice in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        types |= _types(choice)
    return types


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _literal(text: str) -> Any:
    """Return the value of a text that is JSON, or a Python literal that JSON can express (True, None, ['a']); else the
    text itself."""
    for read in (DECODER.decode, read_literal):
        try:
            return json.loads(as_json(read(text)))
        except (ValueError, RecursionError):
            continue
    return text
