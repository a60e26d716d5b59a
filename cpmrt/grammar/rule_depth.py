"""Finds how deep the rules of a grammar in Lark's syntax refer to each other, with the schemas in them."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator

from cpmrt.grammar.depth import Part, deepest
from cpmrt.grammar.schema_depth import schema_levels

_TOKEN = re.compile(r"""
    (?P<skipped> "(?:\\.|[^"\\\n])*" | (?:\#|//)[^\n]* | /(?:\\.|[^/\\])+/[imslux]* | <[^<>\s]+> | @[\w-]+ )
  | %(?P<value> json | regex | llguidance )
  | (?P<inner> %lark )
  | (?P<name> [!?]*_?[a-z][_a-z0-9-]* | _?[A-Z][_A-Z0-9-]* )
  | (?P<sign> [(\[\])~:] )
""", re.VERBOSE)  # fmt: skip
"""What matters of llguidance's tokens of Lark, each as llguidance itself ends it."""
_JSON = json.JSONDecoder(parse_int=str, parse_float=str)
_SPACE = re.compile(r"\s*")


def rule_levels(grammar: str) -> int:
    """Return on how many levels rules, groups and schemas refer to each other or are nested, at most.

    Rules of one name in several inner grammars (`%lark`) count as one rule. Raises ValueError for JSON that is none.
    """
    parts = dict[Hashable, Part]()
    for name, body in _rules(grammar):
        depth = most = 1
        part = parts.setdefault(name, Part(1, []))
        others = list[Hashable]()
        for kind, text in body:
            if kind == "name":
                others.append(text.lstrip("!?"))
            elif kind == "inner":
                others.append("start")
            elif kind == "json":
                others.append(schema := f"%json {len(parts)}")
                parts[schema] = Part(schema_levels(_JSON.decode(text)), [])
            else:
                depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(text, 0)
                most = max(most, depth)
        parts[name] = Part(max(part.levels, most), [*part.others, *others])
    return deepest(parts)


def _rules(grammar: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each rule's name and the tokens of its body; what stands before the first rule has the name ""."""
    name, body, first, num_open = "", list[tuple[str, str]](), 0, 0
    for kind, text in _tokens(grammar):
        if text == ":" and first < len(body):
            yield name, body[:first]
            name, body = body[first][1].lstrip("!?"), body[first + 1 :]
            first = len(body)
            continue
        if kind == "name" and not num_open:
            first = len(body)  # this may be the name of the next rule, before its attributes and the colon
        num_open = max(0, num_open + {"[": 1, "]": -1}.get(text, 0))
        body.append((kind, text))
    yield name, body


def _tokens(grammar: str) -> Iterator[tuple[str, str]]:
    """Yield the tokens that matter, each as its kind and text. Raises ValueError."""
    at = 0
    while found := _TOKEN.search(grammar, at):
        at = found.end()
        if found["value"]:
            begin = _SPACE.match(grammar, at).end()  # type: ignore[union-attr]
            _, at = _JSON.raw_decode(grammar, begin)
            if found["value"] == "json":
                yield "json", grammar[begin:at]
        elif not found["skipped"]:
            yield str(found.lastgroup), found[0]
