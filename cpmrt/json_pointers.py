"""Follows JSON pointers (RFC 6901), by which a JSON schema refers to another place in it."""

from __future__ import annotations

from collections.abc import Mapping


def pointed_at(document: object, pointer: str) -> object:
    """Return what a pointer such as "/$defs/Node" leads to in a JSON value; None if that is nothing."""
    found = document
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(key)
        else:
            found = found[int(key)] if isinstance(found, list) and key.isdecimal() and int(key) < len(found) else None
    return found
