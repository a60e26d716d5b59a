"""Defines a tool call, a function's name and its arguments as JSON, and helpers for the schemas of tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cpmrt.errors import RequestError, quoted


class Call(NamedTuple):
    """A call of a tool that an answer makes: the function's name, and its arguments, a JSON object as text."""

    name: str
    arguments: str


Schemas = Mapping[str, Mapping[str, Any]]
"""Function name -> JSON schema of its parameters."""


def schemas_of(tools: Iterable[Mapping[str, Any]], names: Sequence[str] = ()) -> Schemas:
    """Return the schemas of tools in the OpenAI API's form: of those of these names, or of all if there are none.

    References at their top are resolved. Raises RequestError with the index of a malformed tool.
    """
    schemas = dict[str, Mapping[str, Any]]()
    for index, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            form = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise RequestError(f"tools[{index}]", expected=form, actual=quoted(tool))
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            expected, where = "a JSON schema (an object)", f"tools[{index}].function.parameters"
            raise RequestError(where, expected=expected, actual=quoted(parameters))
        if name in names or not names:
            from cpmrt.tool_use.parameters import plain_parameters  # an answer without tools needs none

            schemas[name] = plain_parameters(parameters)
    return schemas


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of a function's parameters by name; {} if the schema has no object `properties`."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def required_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the parameters that a call must have; none if the schema has no list `required`."""
    required = schema.get("required")
    return frozenset(each for each in (required if isinstance(required, list) else ()) if isinstance(each, str))


def listed_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema's `type` lists; an empty set if it has none."""
    listed = schema.get("type")
    return {each for each in (listed if isinstance(listed, list) else [listed]) if isinstance(each, str)}


def within_floats(number: float) -> float:
    """Return the nearest finite float: a model may write a number beyond all floats, and JSON has no infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, number))


def _first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        values.setdefault(name, value)
    return values


DECODER = json.JSONDecoder(object_pairs_hook=_first_of_each, parse_float=lambda text: within_floats(float(text)))
"""Reads JSON that models write. If a key is repeated its first value counts, as a stream has sent that already."""


def as_json(value: object) -> str:
    """Return a value as JSON. Raises ValueError if JSON cannot express it."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError):
        raise ValueError("arguments that JSON lacks") from None
