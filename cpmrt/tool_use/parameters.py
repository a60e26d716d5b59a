"""Finds the list of a function's parameters where its schema is a reference, as pydantic writes a recursive model, or
is put together from several schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpmrt.json_pointers import pointed_at

COMBINATORS = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords that bring other schemas in beside a schema's own `properties`."""
DEFINITIONS = ("$defs", "definitions")
_PUT_TOGETHER = ("$ref", "allOf")
_NOTES = ("title", "description", "default", "examples", "$schema", "$id", "$comment")
_PLAIN = {"type", "properties", "required"}
_MOST_PARTS = 64


def plain_parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with `$ref` and `allOf` at its top replaced by what they amount to.

    It is returned unchanged if it has neither, if they lead nowhere, and if several parts hold more than properties.
    """
    if not any(key in schema for key in _PUT_TOGETHER):
        return schema
    parts = _parts(schema)
    plain = None if parts is None else parts[0] if len(parts) == 1 else _merged(parts)
    if plain is None:
        return schema
    return dict(plain) | {name: schema[name] for name in DEFINITIONS if name in schema}


def is_open(schema: Mapping[str, Any]) -> bool:
    """Whether a call may have parameters that the `properties` of its function's schema do not name."""
    return bool(schema.get("additionalProperties")) or any(key in schema for key in COMBINATORS)


def _parts(root: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """Return the schemas all of which hold if `root` does, without `$ref` and `allOf`; None if there is no end of them.

    Parts that say nothing are left out.
    """
    rest, parts, silent = [root], list[Mapping[str, Any]](), (*DEFINITIONS, *_PUT_TOGETHER, *_NOTES)
    for _ in range(_MOST_PARTS):
        if not rest:
            return parts or [{}]
        schema = rest.pop(0)
        own = {key: value for key, value in schema.items() if key not in silent}
        if own not in ({}, {"type": "object"}):
            parts.append(own)
        added = schema.get("allOf", [])
        if not isinstance(added, list):
            return None
        targets = [_target(root, schema["$ref"])] if "$ref" in schema else []
        for each in (*targets, *added):
            if not isinstance(each, Mapping):
                return None
            rest.append(each)
    return None


def _target(root: Mapping[str, Any], reference: object) -> object:
    """Return what a reference to one of the definitions of `root` leads to, None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)):
        return None
    return pointed_at(root, reference.removeprefix("#"))


def _merged(parts: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return one schema with the properties of all parts; None if a part holds more, or two differ about a property."""
    properties, required = dict[str, Any](), list[Any]()
    for part in parts:
        own, needed = part.get("properties", {}), part.get("required", [])
        if part.keys() - _PLAIN or part.get("type", "object") != "object":
            return None
        if not isinstance(own, Mapping) or not isinstance(needed, list):
            return None
        if any(name in properties and properties[name] != value for name, value in own.items()):
            return None
        properties |= own
        required += needed
    return {"type": "object", "properties": properties, "required": list(dict.fromkeys(required))}
