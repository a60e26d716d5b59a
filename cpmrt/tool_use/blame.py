"""Finds the tool whose schema is at fault if the grammar of tool calls, which the user has not written, is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cpmrt.errors import RequestError, quoted
from cpmrt.tool_use.calls import Schemas, listed_types, properties_of
from cpmrt.tool_use.formats import HERMES, Format
from cpmrt.tool_use.parameters import COMBINATORS, plain_parameters

_REPORT = re.compile(r"at (?P<line>\d+)\(\d+\): (failed to compile JSON schema: )?(?P<reason>.*?)( \d+ \| .*)?")
"""An error of llguidance about a grammar: line, column, reason, then the lines around it with their numbers."""
_RULE_OF_A_CALL = re.compile(r"[cC](\d+)")
_KINDS = (
    ("enum", list, "an array"), ("pattern", str, "a regular expression"), ("minLength", int, "an integer"),
    ("maxLength", int, "an integer"),
)  # fmt: skip
"""Key of a parameter's schema, the type that its value must have, and that type in words."""


def check_schemas(tools: Sequence[Mapping[str, Any]], schemas: Schemas, form: Format) -> None:
    """Raise RequestError if the schema of one of the tools in `schemas` is one that no call in this format could obey,
    or is malformed."""
    for index, tool in enumerate(tools):
        function = tool["function"]
        if function["name"] not in schemas:
            continue
        schema = plain_parameters(function.get("parameters") or {})
        place = f"in the schema of {quoted(function['name'])}"
        for path, expected, actual in _mistakes(schema):
            raise RequestError(_place(index, f"{path} {place}"), expected=expected, actual=quoted(actual))
        for key in COMBINATORS if form is not HERMES else ():
            if key in schema:
                expected = "properties alone, as this model writes calls parameter by parameter"
                fix, what = "list all parameters in properties", _place(index, f"{key} {place}")
                raise RequestError(what, expected=expected, actual=quoted(schema[key]), fix=fix)


def blamed(
    refusal: RequestError, grammar: str, tools: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> RequestError:
    """Return the error to raise for a refused `grammar` of tool calls: it names the tool, or the other schema.

    The other schema is that of answers without a call. `names` are the tools' names in the order of the grammar's
    rules. A refusal of anything else is returned unchanged.
    """
    if refusal.what != "SamplingParams.grammar":
        return refusal
    if isinstance(refusal.actual, int):
        what, expected = "tools: the grammar of their calls", refusal.expected
        return RequestError(what, expected=expected, actual=refusal.actual, fix=refusal.fix)
    found, rules = _REPORT.fullmatch(str(refusal.actual)), dict(enumerate(grammar.split("\n"), 1))
    rule = rules.get(int(found["line"]), "") if found else ""
    call, reason = _RULE_OF_A_CALL.match(rule), found["reason"] if found else refusal.actual
    if call is not None:
        name = names[int(call[1])]
        index = max(index for index, tool in enumerate(tools) if tool["function"]["name"] == name)
        what = _place(index, f"the schema of {quoted(name)}")
    elif rule.startswith("start:"):
        return RequestError("SamplingParams.json_schema", expected="a JSON schema that can be compiled", actual=reason)
    else:
        what = "tools: the grammar of their calls"
    return RequestError(what, expected="one that can be compiled", actual=reason, fix=refusal.fix)


def _place(index: int, what: str) -> str:
    return f"tools[{index}].function.parameters: {what}"


def _mistakes(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """Yield the mistakes in a function's schema that matter for calls: the place, what is expected, what is there."""
    types = listed_types(schema)
    if types and "object" not in types:
        yield "type", "object", schema["type"]
    if not isinstance(schema.get("properties") or {}, Mapping):
        yield "properties", "an object", schema["properties"]
    if not isinstance(schema.get("required") or [], list):
        yield "required", "an array", schema["required"]
    for name, own in properties_of(schema).items():
        where = f"properties.{name[:60]}"
        if not isinstance(own, (Mapping, bool)):
            yield where, "a JSON schema", own
        elif isinstance(own, Mapping):
            yield from _mistakes_of_one(where, own)


def _mistakes_of_one(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    for key, kind, expected in _KINDS:
        if schema.get(key) is not None and not isinstance(schema[key], kind):
            yield f"{where}.{key}", expected, schema[key]
