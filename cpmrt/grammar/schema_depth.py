"""Finds how deep the schemas of a JSON schema are nested and refer to each other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any
from urllib.parse import unquote

from cpmrt.grammar.depth import Part, deepest
from cpmrt.json_pointers import pointed_at

_NAMES = ("$id", "id", "$anchor", "$dynamicAnchor")
"""The keys that give a schema a name, by which others may refer to it."""
MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""The keys whose value is no schema, but has one for each of its own keys."""
_NAMED = "named"
"""A part that stands for all schemas with a name: which of them a name means, only llguidance finds out."""


def schema_levels(schema: object) -> int:
    """Return on how many levels schemas are nested or refer to each other, at most."""
    documents = [item for item in _inside(schema) if isinstance(item, dict)]
    named = [item for item in documents if item is not schema and any(isinstance(item.get(key), str) for key in _NAMES)]
    references = {item["$ref"] for item in documents if isinstance(item.get("$ref"), str)}
    targets = {reference: _target(schema, reference) for reference in references}
    roots = {id(item): item for item in (schema, *named, *targets.values()) if isinstance(item, dict)}
    parts: dict[Hashable, Part] = {_NAMED: Part(0, [id(item) for item in named])}
    for name, item in roots.items():
        parts[name] = _part(item, roots, targets)
    return deepest(parts)


def _inside(value: object) -> Iterator[object]:
    """Yield a JSON value and all values in it."""
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, (dict, list)):
            pending += value.values() if isinstance(value, dict) else value


def _target(schema: object, reference: str) -> object:
    """Return what a reference means as a JSON pointer into the whole schema; None if it is none, or leads nowhere."""
    pointer = unquote(reference.partition("#")[2])
    return None if pointer and not pointer.startswith("/") else pointed_at(schema, pointer)


def _part(root: dict[str, Any], roots: dict[int, Any], targets: dict[str, object]) -> Part:
    """Return the part that begins at `root` and ends where others begin. Lists, and a `$ref` alone, are no levels."""
    most, others = 1, list[Hashable]()
    pending: list[tuple[Any, int, bool]] = [(root, 1, False)]
    while pending:
        value, level, is_map = pending.pop()
        if isinstance(value, dict):
            most = max(most, level if value.keys() != {"$ref"} else level - 1)
            if isinstance(reference := value.get("$ref"), str):
                others += (id(targets[reference]), _NAMED)
            inside = [(each, key in MAPS and not is_map) for key, each in value.items()]
        else:
            inside = [(each, False) for each in value]
        for each, of_schemas in inside:
            if id(each) in roots:
                others.append(id(each))
            elif isinstance(each, (dict, list)):
                pending.append((each, level + (isinstance(each, dict) and not of_schemas), of_schemas))
    return Part(most, others)
