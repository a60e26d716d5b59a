"""Reads and writes long JSON while other threads can run: the C code of the json module holds the interpreter to its
end."""

from __future__ import annotations

import io
import json
import json.scanner
from typing import Any

LONG = 64 * 1024
"""The length of a text from which on other threads would wait too long for the usual decoder."""
MANY = 4096
"""The number of values within one from which on other threads would wait too long for the usual encoder."""


class Decoders:
    """A decoder for short texts, which is fast, and one for long texts; `options` are those of `json.JSONDecoder`."""

    def __init__(self, **options: Any):
        self._short = json.JSONDecoder(**options)
        self._long = json.JSONDecoder(**options, object_pairs_hook=_object_of)
        self._long.scan_once = json.scanner.py_make_scanner(self._long)  # type: ignore[attr-defined]

    def decode(self, text: str) -> Any:
        """Return the value of a text. Raises ValueError, RecursionError."""
        return (self._short if len(text) < LONG else self._long).decode(text)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of these pairs, taken off their list one by one: in one go other threads would wait long."""
    pairs.reverse()
    values: dict[str, Any] = {}
    while pairs:
        name, values[name] = pairs.pop()
    return values


def encoded(value: object, **options: Any) -> str:
    """Return a value as JSON, as `json.dumps` does with the same options. Raises TypeError, ValueError."""
    if not _has_many(value):
        return json.dumps(value, **options)
    text = io.StringIO()
    for part in json.JSONEncoder(**options).iterencode(value):  # which is written in Python, unlike `encode`
        text.write(part)
    return text.getvalue()


def _has_many(value: object) -> bool:
    """Whether a value has MANY values within it, at any depth. One that contains itself has."""
    left, found = [value], 0
    while left and found < MANY:
        first = left.pop()
        inner = first.values() if isinstance(first, dict) else first if isinstance(first, (list, tuple)) else ()
        found += len(inner)
        if found < MANY:
            left.extend(inner)
    return found >= MANY
