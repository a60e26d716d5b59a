"""What a tool call is: a function's name and its arguments, checked against nothing but JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cpmrt.errors import RequestError, quoted


class Call(NamedTuple):
    """A function's name and its arguments, a JSON object as text."""

    name: str
    arguments: str


Schemas = Mapping[str, Mapping[str, Any]]
"""Function name -> JSON schema of its parameters."""


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> Schemas:
    """Return the schemas of tools as the OpenAI API describes them. Raises RequestError with the index of any other."""
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
        schemas[name] = parameters
    return schemas


def listed_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema lists as its `type`; none if it does not say."""
    listed = schema.get("type")
    return {listed} if isinstance(listed, str) else set(listed) if isinstance(listed, list) else set()


def as_json(value: object) -> str:
    """Write arguments as JSON. Raises ValueError if JSON lacks one of the values."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, RecursionError):
        raise ValueError("arguments that JSON lacks") from None
