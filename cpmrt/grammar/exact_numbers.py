"""Finds the numbers of JSON schemas that llguidance cannot keep: to it all are floats, bounds 64-bit integers."""

from __future__ import annotations

import json
from collections.abc import Iterator

from cpmrt.grammar.lark_tokens import lark_tokens

_LISTED = ("const", "enum")
_INCLUSIVE = ("minimum", "maximum")
_OTHERS = ("exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_UPPER = ("maximum", "exclusiveMaximum")
_FLOAT_INTEGERS = 2**53
"""Floats hold every integer up to this one."""
_END = 2**63
_CRASHING = -(2.0**62)
"""Upper bounds above this are safe; near the least 64-bit integer llguidance may crash."""


def check_schema(schema: object) -> None:
    """Raise ValueError if a number of a JSON schema would become another one in llguidance."""
    for keyword, number, is_integer in _numbers(schema):
        if not _is_kept(keyword, number, is_integer):
            raise ValueError(f"the number {str(number)[:40]} in {keyword}, which would lose digits: use a string")


def check_lark(grammar: str) -> None:
    """Check the JSON schemas within a grammar in Lark's syntax. Raises ValueError as llguidance words its own."""
    for kind, text, start in lark_tokens(grammar):
        if kind != "json":
            continue
        try:
            check_schema(json.loads(text))
        except ValueError as error:
            line_start = grammar.rfind("\n", 0, start) + 1
            raise ValueError(f"at {grammar.count(chr(10), 0, start) + 1}({start - line_start + 1}): {error}") from None


def _numbers(schema: object) -> Iterator[tuple[str, int | float, bool]]:
    """Yield (keyword, number, whether the schema around it is of integers) of all numbers that bind values.

    What only looks like a schema (a default, say) counts too: a `$ref` may point there.
    """
    rest: list[tuple[str, object, bool]] = [("", schema, False)]
    while rest:
        keyword, value, is_integer = rest.pop()
        if isinstance(value, dict):
            is_integer = value.get("type") == "integer"
            rest += [(keyword if keyword in _LISTED else key, each, is_integer) for key, each in value.items()]
        elif isinstance(value, list):
            rest += [(keyword, each, is_integer) for each in value]
        elif isinstance(value, (int, float)) and keyword in (*_LISTED, *_INCLUSIVE, *_OTHERS):
            yield keyword, value, is_integer


def _is_kept(keyword: str, number: int | float, is_integer: bool) -> bool:
    if isinstance(number, float):
        return keyword not in _UPPER or number > _CRASHING
    if abs(number) < _FLOAT_INTEGERS:
        return True
    if keyword in _OTHERS:
        return False
    if keyword in _INCLUSIVE and not is_integer:
        return abs(number) == _FLOAT_INTEGERS
    is_last = number == _END - 1 and keyword != "minimum"  # llguidance cuts the float, 2^63, down to it
    return is_last or (abs(number) < _END and float(number) == number)
