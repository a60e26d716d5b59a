"""Reads a grammar in Lark's syntax as tokens, each ended as llguidance itself ends it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

_TOKEN = re.compile(r"""
    (?P<skipped> "(?:\\.|[^"\\\n])*" | (?:\#|//)[^\n]* | /(?:\\.|[^/\\])+/[imslux]* | <[^<>\s]+> | @[\w-]+ )
  | %(?P<value> json | regex | llguidance ) \s*
  | (?P<inner> %lark )
  | (?P<name> [!?]*_?[a-z][_a-z0-9-]* | _?[A-Z][_A-Z0-9-]* )
  | (?P<sign> [(\[\])~:] )
""", re.VERBOSE)  # fmt: skip
_JSON = json.JSONDecoder()


class LarkToken(NamedTuple):
    """A token: its kind (a "name", a "sign", "inner" for %lark, or the "json" behind %json), text and place."""

    kind: str
    text: str
    start: int


def lark_tokens(grammar: str) -> Iterator[LarkToken]:
    """Yield the names, brackets, colons, inner grammars and JSON schemas. Raises ValueError for JSON that is none."""
    at = 0
    while found := _TOKEN.search(grammar, at):
        at = found.end()
        if found["value"]:
            _, at = _JSON.raw_decode(grammar, found.end())
            if found["value"] == "json":
                yield LarkToken("json", grammar[found.end() : at], found.end())
        elif not found["skipped"]:
            yield LarkToken(str(found.lastgroup), found[0], found.start())
