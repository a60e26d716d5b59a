"""The formats in which models write tool calls, and their parsers. Nothing that a model writes is executed.

| format | between | one call |
|---|---|---|
| Hermes, Qwen | `<tool_call>`, `</tool_call>` | `{"name": "f", "arguments": {...}}` |
| MiniCPM3, MiniCPM4 | `<|tool_call_start|>`, `<|tool_call_end|>` | `f(a=1, b="x")` a line, in a Python fence |
| MiniCPM5 | `<function name="f">`, `</function>` | `<param name="a">1</param>`, values in CDATA where needed |
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import NamedTuple

from cpmrt.tool_use.calls import DECODER, Call, Schemas, as_json, properties_of
from cpmrt.tool_use.python_literals import literal, parsed
from cpmrt.tool_use.xml_calls import read_xml_call

MAX_CALL_CHARACTERS = 2**20
_FENCE = re.compile(r"\A\s*```[a-z]*\n(.*?)\n?```\s*\Z", re.DOTALL)


class Quoting(NamedTuple):
    """A way to quote text in a block; markers inside a quotation do not count.

    `opening` begins a quotation. `closing` matches its end, and escape sequences within it, which begin with a
    backslash. `partial` matches the end of the text so far if it may become either of these.
    """

    opening: str
    closing: re.Pattern[str]
    partial: re.Pattern[str]


class Format(NamedTuple):
    """A format of tool calls: the markers around a block, the ways of quoting in it, and a parser.

    `read` parses the text between the markers, and raises ValueError if that is no call.
    """

    start: str
    end: str
    quotings: tuple[Quoting, ...]
    read: Callable[[str, Schemas], list[Call]]


class EndFinder:
    """Finds the end marker of a block that grows, reading each character of the block once.

    Quoted end markers do not count, unless `skips_quoted` is False.
    """

    def __init__(self, form: Format, *, skips_quoted: bool = True):
        quotings = form.quotings if skips_quoted else ()
        marks = [*(quoting.opening for quoting in quotings), form.end]
        self._outside = re.compile("|".join(map(re.escape, marks)))
        self._longest = max(map(len, marks))
        self._end, self._quotings = form.end, {quoting.opening: quoting for quoting in quotings}
        self._inside: Quoting | None = None
        self._at = 0

    def find(self, text: str) -> int | None:
        """Return the position of the end marker, None if it has not come; `text` begins with that of the last call."""
        while True:
            found = (self._inside.closing if self._inside else self._outside).search(text, self._at)
            if found is None:
                self._wait(text)
                return None
            if found[0] == self._end:
                return found.start()
            self._at = found.end()
            if self._inside is None:
                self._inside = self._quotings[found[0]]
            elif not found[0].startswith("\\"):
                self._inside = None

    def _wait(self, text: str) -> None:
        """Set where the next search must begin, as nothing was found in this text."""
        if self._inside is None:
            self._at = max(self._at, len(text) - self._longest + 1)
        else:
            partial = self._inside.partial.search(text, self._at)
            self._at = partial.start() if partial else len(text)


def read_json_call(text: str, schemas: Schemas) -> list[Call]:
    """Read calls in the format of Hermes: one JSON object, or an array of them."""
    try:
        value = DECODER.decode(text)
        return [_json_call(entry) for entry in (value if isinstance(value, list) else [value])]
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _json_call(value: object) -> Call:
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("no tool call")
    return Call(name, as_json(arguments))


def read_python_calls(text: str, schemas: Schemas) -> list[Call]:
    """Read calls in the format of MiniCPM3 and MiniCPM4: Python call expressions, whose arguments are literals.

    Positional arguments are taken in the order of the schema's properties.
    """
    fenced = _FENCE.match(text)
    calls = [_python_call(statement, schemas) for statement in parsed((fenced[1] if fenced else text).strip())]
    if not calls:
        raise ValueError("no call")
    return calls


def _python_call(statement: ast.stmt, schemas: Schemas) -> Call:
    node = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    name = _dotted(node.func)
    order = list(properties_of(schemas.get(name, {})))
    if len(node.args) > len(order):
        raise ValueError("positional arguments without names")
    arguments = {order[index]: literal(value) for index, value in enumerate(node.args)}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("unpacked arguments")
        arguments.setdefault(keyword.arg, literal(keyword.value))
    return Call(name, as_json(arguments))


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise ValueError("no function name")
    return ".".join([node.id, *reversed(parts)])


_CDATA = Quoting("<![CDATA[", re.compile(r"\]\]>"), re.compile(r"\]{1,2}\Z"))
_DOUBLE, _SINGLE = (Quoting(mark, re.compile(rf"\\.|{mark}", re.DOTALL), re.compile(r"\\\Z")) for mark in "\"'")
HERMES = Format("<tool_call>", "</tool_call>", (_DOUBLE,), read_json_call)
PYTHON = Format("<|tool_call_start|>", "<|tool_call_end|>", (_DOUBLE, _SINGLE), read_python_calls)
XML = Format('<function name="', "</function>", (_CDATA,), read_xml_call)
FORMATS = (HERMES, PYTHON, XML)
