"""Forms for tests: JSON schemas drawn from a table of kinds, regular expressions, and Lark grammars with a parser."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["name", "id", "größe", "is_open", "x", "名前", "unit price", "tags"]
PATTERNS = ["^[A-Z]{2,4}$", "^[0-9]{3}-[0-9]{2}$", "^(cat|dog)s?$", "^[a-f0-9]{4}$"]
VALUES = ["red", "blue", "größer", "日本", "a \"quoted\" one", "", 3, -1, 2.5, True, False, None]


def schemas(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return schemas of objects: every kind of value in turn, nested up to three deep."""
    return [_object(random.Random(f"{seed} {number}"), number, 0) for number in range(count)]


def _object(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    names = draw.sample(NAMES, draw.randint(1, 3))
    kinds = [_KINDS[(number + place) % len(_KINDS)] for place in range(len(names))]
    properties = {name: kind(draw, number, depth + 1) for name, kind in zip(names, kinds, strict=True)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    required = names if draw.random() < 0.7 else names[:1]
    return schema | {"required": required} | (_definitions(draw) if depth == 0 else {})


def _definitions(draw: random.Random) -> dict[str, Any]:
    """Return the definition that `_reference` refers to."""
    properties = {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "y": {"type": "boolean"}}
    point = {"type": "object", "properties": properties, "required": ["x", "y"], "additionalProperties": False}
    return {"$defs": {"point": point}}


def _text(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    low = draw.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 8)}


def _pattern(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": PATTERNS[number % len(PATTERNS)]}


def _integer(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    low = draw.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 5000)}


def _number(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + draw.randint(1, 9)}


def _enum(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    return {"enum": draw.sample(VALUES, draw.randint(1, 5))}


def _array(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    low = draw.randint(0, 2)
    items = (_integer, _enum, _pattern)[number % 3](draw, number, depth)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + draw.randint(0, 3)}


def _any_of(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "null"}, _integer(draw, number, depth), _text(draw, number, depth)]}


def _reference(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    return {"$ref": "#/$defs/point"}


def _nested(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    return _object(draw, number + 1, depth) if depth < 3 else {"type": "boolean"}


def _constant(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    return {"const": VALUES[number % len(VALUES)]}


def _tuple(draw: random.Random, number: int, depth: int) -> dict[str, Any]:
    prefix = [{"type": "boolean"}, _integer(draw, number, depth)]
    return {"type": "array", "prefixItems": prefix, "items": False, "minItems": 2}


_KINDS = [_text, _integer, _nested, _enum, _array, _any_of, _reference, _pattern, _number, _constant, _tuple]

REGEXES = [
    f"{first}{middle}{last}"
    for first in ("[a-z]{1,4}", "(yes|no|maybe)", r"\d{2}", "[A-F0-9]{2,6}", "ab?c")
    for middle in ("", "-", " = ", r"\.[0-9]{1,3}", "(x|yz){0,3}")
    for last in ("", "!", "[^a-z]{1,2}", "(?:end|stop)")
]
"""100 regular expressions that match only short texts, and mean the same to Python."""

_TOKENS = {
    "WORD": "/[a-z]{1,6}/", "NUMBER": "/[0-9]{1,4}/", "NAME": "/[A-Z][a-z]{0,5}/", "FLAG": '"on" | "off"',
    "OP": '"+" | "-" | "*"', "SIGN": '"<" | ">"',
}  # fmt: skip
_RULES = [
    ("start: WORD \" \" NUMBER", "WORD NUMBER"), ('start: "(" item ")"\nitem: NUMBER | WORD', "NUMBER WORD"),
    ('start: NUMBER (OP NUMBER)*', "NUMBER OP"), ('start: "[" [WORD ("," WORD)*] "]"', "WORD"),
    ('start: pair+\npair: NAME "=" FLAG ";"', "NAME FLAG"),
    ('start: "if " NAME SIGN NUMBER " then " WORD', "NAME SIGN NUMBER WORD"),
]  # fmt: skip
LARK_GRAMMARS = [
    "\n".join([rule.replace("start: ", f'start: "{mark}" '), *(f"{name}: {_TOKENS[name]}" for name in names.split())])
    for mark in ("f", "größe ", "say: ", "-> ", "==")
    for rule, names in _RULES
]
"""30 grammars."""
