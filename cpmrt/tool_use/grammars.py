"""Writes grammars, in llguidance's Lark syntax, of answers that are calls of given tools in a model's own format.

| format | a call |
|---|---|
| Hermes | the arguments are JSON of the tool's schema |
| Python | keyword arguments in the order of the schema, each JSON of its property's schema |
| XML | parameters in that order; texts as they are or in CDATA, arrays and objects in CDATA, other values as JSON |
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from cpmrt.config.form import JSON_STYLE, as_terminal
from cpmrt.errors import RequestError, quoted
from cpmrt.text import ChatTemplate, Tokenizer
from cpmrt.text.markers import special_markers
from cpmrt.tool_use.calls import Schemas, listed_types, properties_of, required_of
from cpmrt.tool_use.formats import HERMES, PYTHON, XML, Format
from cpmrt.tool_use.parameters import COMBINATORS, DEFINITIONS
from cpmrt.tool_use.text_patterns import expression_of, is_constrained
from cpmrt.tool_use.xml_calls import text_choices

_ESCAPES = 'nrbtf\\"'
_JSON = {**JSON_STYLE, "json_allowed_escapes": _ESCAPES}
"""How JSON is written in calls. Only escape sequences that Python has too, without \\u, which writes surrogates."""
MAX_CALLS = 32
"""The most calls of one answer."""
_MAX_TEXT = 4000
"""The most characters of an XML parameter that is text, if its schema gives no limit."""
_TEXT = rf"/[^<&\n]{{1,{_MAX_TEXT}}}/"
_FENCE, _FENCE_END = "\n```python\n", "\n```\n"
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


def format_of(template: ChatTemplate | None) -> Format:
    """Return the format in which a model writes calls: the one whose start marker its template has, else Hermes's."""
    shown = "" if template is None else template.text
    return next((form for form in (PYTHON, XML, HERMES) if form.start in shown), HERMES)


def grammar_of(
    form: Format, schemas: Schemas, tokenizer: Tokenizer, *, one_call: bool, instead: str | None = None
) -> str:
    """Return the grammar of one or more calls of these tools (only one with `one_call`).

    If the JSON schema `instead` is given, an answer may be JSON of that schema in place of calls. Raises RequestError
    for names that the format cannot have.
    """
    for name in schemas:
        if not _NAME.fullmatch(name):
            raise RequestError(f"tools: the name {quoted(name)}", expected="letters, digits and _ . : -")
    rules = _Rules(partial(_terminals, special_markers(tokenizer)))
    make = {PYTHON.start: rules.python_call, XML.start: rules.xml_call}.get(form.start, rules.json_call)
    calls = [make(f"c{number}", name, schema) for number, (name, schema) in enumerate(schemas.items())]
    rules.add("call", " | ".join(calls))
    between = "" if form.start == XML.start else rules.text("\n")
    start = "call" if one_call else f"call ({between} call){{0,{MAX_CALLS - 1}}}"
    if form.start == PYTHON.start:
        start = f"{rules.text(PYTHON.start + _FENCE)} {start} {rules.text(_FENCE_END + PYTHON.end)}"
    rules.add("start", start if instead is None else f"{start} | {_json(json.loads(instead))}")
    return "\n".join(rules.lines)


class _Rules:
    """Collects the rules of a grammar, one a line; `text` turns a text into terminals."""

    def __init__(self, text: Callable[[str], str]):
        self.text, self.lines = text, list[str]()

    def add(self, name: str, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def json_call(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        before = self.text(f'{HERMES.start}\n{{"name": {json.dumps(name)}, "arguments": ')
        after = self.text("}\n" + HERMES.end)
        return self.add(rule, f"{before} {_json(_arguments(schema))} {after}")

    def python_call(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        for part in (*name.split("."), *properties_of(schema)):
            if not part.isidentifier() or keyword.iskeyword(part):
                expected = "a name as Python has them, for this model"
                raise RequestError(f"tools: the name {quoted(part)}", expected=expected)
        pairs = [
            (self.text(f"{key}="), _json(_within(schema, value)), is_required)
            for key, value, is_required in _properties(schema)
        ]
        return self.add(rule, f"{self.text(f'{name}(')} {self._list(rule, pairs, self.text(', '))} {self.text(')')}")

    def xml_call(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        parameters = []
        for number, (key, value, is_required) in enumerate(_properties(schema)):
            body = self._xml_value(f"{rule}v{number}", _within(schema, value))
            parameters.append((self.text(f'<param name="{key}">'), f"{body} {self.text('</param>')}", is_required))
        before = self.text(f'{XML.start}{name}">')
        return self.add(rule, f"{before} {self._list(rule, parameters, '')} {self.text(XML.end)}")

    def _list(self, rule: str, items: list[tuple[str, str, bool]], separator: str) -> str:
        """Add the rules of items (head, body, is_required) in order, with separators; return the first rule's name.

        Items that are not required may be left out.
        """
        empty = f"{rule}end"
        self.add(empty, '""')
        first = rest = empty
        for number in reversed(range(len(items))):
            head, body, is_required = items[number]
            item = f"{head} {body} {rest}"
            first_body, rest_body = item, f"{separator} {item}"
            if not is_required:
                first_body, rest_body = f"{first_body} | {first}", f"{rest_body} | {rest}"
            rest = self.add(f"{rule}r{number}", rest_body)
            first = self.add(f"{rule}f{number}", first_body)
        return first

    def _xml_value(self, rule: str, schema: dict[str, Any]) -> str:
        kinds = listed_types(schema)
        choices = text_choices(schema)
        if choices:
            return "(" + " | ".join(self.text(_escaped(choice)) for choice in choices) + ")"
        if kinds == {"string"}:
            is_free = not is_constrained(schema)
            if is_free:
                text = rf"/(.|\n){{0,{_MAX_TEXT}}}/"
            else:
                text = self.add(f"{rule}t".upper(), expression_of(schema, _MAX_TEXT))
            cdata = f"{self.text('<![CDATA[')} " + self.add(f"{rule}c", text, '[suffix="]]>"]')
            return f"({_TEXT} | {cdata})?" if is_free else cdata
        if kinds and not kinds & {"array", "object", "string"}:
            return _json(schema)
        return f"{self.text('<![CDATA[')} {_json(schema)} {self.text(']]>')}"


def _terminals(special: Mapping[str, int], text: str) -> str:
    """Return a text as terminals; special tokens stand as token ids, since to a grammar they are no text."""
    parts = [text]
    if special:
        longest_first = sorted(special, key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    written = [f"<[{special[part]}]>" if part in special else as_terminal(part) for part in parts]
    return " ".join(terminal for terminal in written if terminal != '""')


def _json(schema: Mapping[str, Any]) -> str:
    has_control_characters = re.search(r"\\u|\x7f", json.dumps(schema, ensure_ascii=False))
    style = _JSON | {"json_allowed_escapes": f"{_ESCAPES}u"} if has_control_characters else _JSON
    return "%json " + json.dumps({"x-guidance": style, **schema}, ensure_ascii=False)


def _arguments(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of all arguments: an object.

    It has no additional properties unless the schema allows them, or brings in other schemas, whose properties would
    count as additional.
    """
    is_closed = not any(key in schema for key in COMBINATORS)
    return {**({"additionalProperties": False} if is_closed else {}), **schema, "type": "object"}


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield each property as (name, schema, is_required). Raises RequestError for an impossible name."""
    required = required_of(schema)
    for name, value in properties_of(schema).items():
        if not _NAME.fullmatch(name):
            raise RequestError(f"tools: the parameter {quoted(name)}", expected="letters, digits and _ . : -")
        yield name, value, name in required


def _within(schema: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """Return the schema of a property on its own, with the definitions of the whole schema that it may refer to."""
    own = dict(value) if isinstance(value, Mapping) else {}
    return {name: schema[name] for name in DEFINITIONS if name in schema} | own


def _escaped(text: str) -> str:
    """Return a text as the value of an XML parameter, in CDATA if it needs that."""
    if not re.search(r"[<&\n]|^\s|\s$|^$", text):
        return text
    return "<![CDATA[" + text.replace("]]>", "]]]]><![CDATA[>") + "]]>"
