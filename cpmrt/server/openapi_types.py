"""The pieces that the schemas of the OpenAPI document are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
TRUE, NULL = {"const": True}, {"type": "null"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def optional(*types: str, **rules: Any) -> Schema:
    """Return the schema of a field of one of these types, or null."""
    return {"type": [*types, "null"], **rules}


def array(items: Schema, **rules: Any) -> Schema:
    return {"type": "array", "items": items, **rules}


def object_of(required: Schema, more: Schema | None = None, rules: Sequence[Schema] = ()) -> Schema:
    described = {"type": "object", "properties": required | (more or {}), "required": list(required)}
    return described | ({"allOf": list(rules)} if rules else {})


def either(*alternatives: Schema) -> Schema:
    """Return the rule that an object has the fields of one of these: each with its values, all of them given."""
    return {"anyOf": [{"properties": fields, "required": list(fields)} for fields in alternatives]}


def unless(field: Schema, needed: Schema) -> Schema:
    """Return the rule that a field has the given values, or is not there, unless the needed fields are given."""
    return {"anyOf": [{"properties": field}, {"properties": needed, "required": list(needed)}]}
