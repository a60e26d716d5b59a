"""Parsers for the formats in which models write tool calls. Nothing that a model writes is executed.

| format | between | one call |
|---|---|---|
| Hermes, Qwen | `<tool_call>`, `</tool_call>` | `{"name": "f", "arguments": {...}}` |
| MiniCPM3, MiniCPM4 | `<|tool_call_start|>`, `<|tool_call_end|>` | `f(a=1, b="x")` a line, in a Python fence |
| MiniCPM5 | `<function name="f">`, `</function>` | `<param name="a">1</param>`, values in CDATA where needed |
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from html import unescape
from typing import Any, NamedTuple

MAX_CALL_CHARACTERS = 2**20
_FENCE = re.compile(r"\A\s*```[a-z]*\n(.*?)\n?```\s*\Z", re.DOTALL)
_FUNCTION = re.compile(r'\A([^"]+)"\s*>(.*)\Z', re.DOTALL)
_PARAM = re.compile(r'<param name="([^"]+)"\s*>(.*?)</param>', re.DOTALL)
_CDATA = re.compile(r"\A\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL)


class Call(NamedTuple):
    """A function's name and its arguments, a JSON object as text."""

    name: str
    arguments: str


Schemas = Mapping[str, Mapping[str, Any]]
"""Function name -> properties of its parameters (JSON schemas by name, in order)."""


class Format(NamedTuple):
    """The markers around a block, and `read` for the text between them, which raises ValueError if that is no call."""

    start: str
    end: str
    read: Callable[[str, Schemas], list[Call]]


def schemas_of(tools: list[dict[str, Any]]) -> Schemas:
    return {
        tool["function"]["name"]: (tool["function"].get("parameters") or {}).get("properties") or {} for tool in tools
    }


def read_json_call(text: str, schemas: Schemas) -> list[Call]:
    """Read Hermes's format: one JSON object, or an array of them."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return [_json_call(entry) for entry in (value if isinstance(value, list) else [value])]


def _json_call(value: object) -> Call:
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no tool call")
    return Call(name, _dumps(arguments))


def read_python_calls(text: str, schemas: Schemas) -> list[Call]:
    """Read MiniCPM3's and 4's: call expressions of literals, positional ones in the order of the schema."""
    fenced = _FENCE.match(text)
    try:
        tree = ast.parse((fenced[1] if fenced else text).strip())
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("no Python") from None
    calls = [_python_call(statement, schemas) for statement in tree.body]
    if not calls:
        raise ValueError("no call")
    return calls


def _python_call(statement: ast.stmt, schemas: Schemas) -> Call:
    node = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    name = _dotted(node.func)
    order = list(schemas.get(name, {}))
    if len(node.args) > len(order):
        raise ValueError("positional arguments without names")
    arguments = {order[index]: _literal(value) for index, value in enumerate(node.args)}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("unpacked arguments")
        arguments[keyword.arg] = _literal(keyword.value)
    return Call(name, _dumps(arguments))


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError("no function name")
    return ".".join([node.id, *reversed(parts)])


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    try:
        return ast.literal_eval(node)
    except (RecursionError, MemoryError, TypeError, SyntaxError):
        raise ValueError("no literal") from None


def read_xml_call(text: str, schemas: Schemas) -> list[Call]:
    """Read MiniCPM5's, after `<function name="`: strings are taken as they are, other values as JSON if they are."""
    function = _FUNCTION.match(text)
    if not function or _PARAM.sub("", function[2]).strip():
        raise ValueError("no tool call")
    types = schemas.get(function[1], {})
    arguments = {name: _xml_value(value, types.get(name)) for name, value in _PARAM.findall(function[2])}
    return [Call(function[1], _dumps(arguments))]


def _xml_value(text: str, schema: object) -> Any:
    quoted = _CDATA.match(text)
    value = quoted[1] if quoted else unescape(text)
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _dumps(arguments: dict[str, Any]) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError):
        raise ValueError("arguments that JSON lacks") from None


FORMATS = (
    Format("<tool_call>", "</tool_call>", read_json_call),
    Format("<|tool_call_start|>", "<|tool_call_end|>", read_python_calls),
    Format('<function name="', "</function>", read_xml_call),
)
