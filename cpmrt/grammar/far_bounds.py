"""Leaves the ends of the 64-bit integers out of schemas, as if there was no bound: llguidance takes no such bounds."""

from __future__ import annotations

import json
from numbers import Real
from typing import Any

from cpmrt.config.integers import is_number
from cpmrt.grammar.lark_tokens import lark_tokens
from cpmrt.grammar.schema_depth import MAPS

_FAR = 2**63 - 512
"""From here on a number is 2**63 to llguidance, which reads bounds as 64-bit floats."""
_LEAST = ("minimum", "exclusiveMinimum")
_MOST = ("maximum", "exclusiveMaximum")
_VALUES = ("const", "enum", "default", "examples")
"""The keys whose value is no schema, but a JSON value or a list of some."""


def schema_without_far_bounds(text: str) -> str:
    """Return a JSON schema without the bounds of integers that are at the ends of 64 bits, or beyond."""
    schema = json.loads(text)
    found = sum([_leave_out(integers) for integers in _schemas(schema)])
    return json.dumps(schema, ensure_ascii=False) if found else text


def grammar_without_far_bounds(grammar: str) -> str:
    """Return a grammar in Lark's syntax whose schemas have no such bounds. Raises ValueError for JSON that is none."""
    pieces, at = list[str](), 0
    for kind, text, start in lark_tokens(grammar):
        if kind == "json":
            pieces += (grammar[at:start], schema_without_far_bounds(text))
            at = start + len(text)
    return "".join(pieces) + grammar[at:]


def _schemas(schema: object) -> list[dict[str, Any]]:
    """Return all schemas in a schema."""
    found, pending = list[dict[str, Any]](), [(schema, False)]
    while pending:
        value, is_map = pending.pop()
        if isinstance(value, list):
            pending += [(each, False) for each in value]
        elif isinstance(value, dict) and is_map:
            pending += [(each, False) for each in value.values()]
        elif isinstance(value, dict):
            found.append(value)
            pending += [(each, key in MAPS) for key, each in value.items() if key not in _VALUES]
    return found


def _leave_out(schema: dict[str, Any]) -> bool:
    """Remove the bounds of a schema of integers that are no bounds; return whether there were any."""
    if "integer" not in (schema.get("type"), *_listed(schema.get("type"))):
        return False
    far = [key for key in _LEAST if is_number(schema.get(key), Real) and schema[key] <= -_FAR]
    far += [key for key in _MOST if is_number(schema.get(key), Real) and schema[key] >= _FAR]
    for key in far:
        del schema[key]
    return bool(far)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
