"""Finds how deep the rules of a grammar in Lark's syntax refer to each other, with the schemas in them."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator

from cpmrt.grammar.depth import Part, deepest
from cpmrt.grammar.lark_tokens import LarkToken, lark_tokens
from cpmrt.grammar.schema_depth import schema_levels

_OPEN = {"(": 1, "[": 1, ")": -1, "]": -1}


def rule_levels(grammar: str) -> int:
    """Return on how many levels rules, groups and schemas refer to each other or are nested, at most.

    Rules of one name in several inner grammars (`%lark`) count as one rule. Raises ValueError for JSON that is none.
    """
    parts = dict[Hashable, Part]()
    for name, body in _rules(grammar):
        depth = most = 1
        part, others = parts.setdefault(name, Part(1, [])), list[Hashable]()
        for kind, text, _ in body:
            if kind == "name":
                others.append(text.lstrip("!?"))
            elif kind == "inner":
                others.append("start")
            elif kind == "json":
                others.append(schema := f"%json {len(parts)}")
                parts[schema] = Part(schema_levels(json.loads(text)), [])
            else:
                depth += _OPEN.get(text, 0)
                most = max(most, depth)
        parts[name] = Part(max(part.levels, most), [*part.others, *others])
    return deepest(parts)


def _rules(grammar: str) -> Iterator[tuple[str, list[LarkToken]]]:
    """Yield each rule's name and the tokens of its body; what stands before the first rule has the name ""."""
    name, body, last, num_open = "", list[LarkToken](), 0, 0
    for token in lark_tokens(grammar):
        if token.text == ":" and last < len(body):
            yield name, body[:last]
            name, body = body[last].text.lstrip("!?"), body[last + 1 :]
            last = len(body)
            continue
        if token.kind == "name" and not num_open:
            last = len(body)  # this may be the name of the next rule, before its attributes and the colon
        num_open = max(0, num_open + {"[": 1, "]": -1}.get(token.text, 0))
        body.append(token)
    yield name, body
