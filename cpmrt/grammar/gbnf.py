"""Converts grammars in the syntax of llama.cpp (GBNF) to that of Lark, by llguidance's own converter."""

from __future__ import annotations

import re
from itertools import count

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\[\]])|.)", re.DOTALL)
"""An escape sequence; the groups are the digits of a code point (\\u, \\U), or the bracket that it stands for."""
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[\w-]+', re.DOTALL)
"""One token of GBNF: a quoted text, a character class, a comment or the name of a rule."""


def in_lark(text: str) -> str:
    """Return a grammar in Lark's syntax. GBNF (known by its `::=`) is converted, other text kept. Raises ValueError."""
    if not _RULE.search(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(_ESCAPE.sub(_plain_escape, _without_start(text))))
    except Exception as error:  # the converter only reads text, but may raise any type
        raise ValueError(f"{error}, where it was read as GBNF") from None


def _without_start(text: str) -> str:
    """Rename a rule called `start`: the first rule is `root` in GBNF and becomes `start` in Lark."""
    other = next(name for number in count() if (name := f"start{number}") not in text)
    return _TOKEN.sub(lambda token: other if token[0] == "start" else token[0], text)


def _plain_escape(escape: re.Match[str]) -> str:
    """Return an escape sequence of GBNF in a form that llguidance's converter keeps, both in a text and in a class.

    The converter drops leading zeros of code points, and takes escaped brackets only in classes.
    """
    digits, bracket = escape[1] or escape[2], escape[3]
    if not (digits or bracket):
        return escape[0]
    code = int(digits, 16) if digits else ord(bracket)
    return f"\\x{code:02x}" if code < 0x100 else chr(code)
