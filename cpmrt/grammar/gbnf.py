"""Reads grammars in the syntax of llama.cpp (GBNF), through llguidance's conversion to that of Lark."""

from __future__ import annotations

import re
from itertools import count

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\[\]])|.)", re.DOTALL)
"""Any escape sequence, with the digits of a character's number, or the bracket that it stands for."""
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[\w-]+', re.DOTALL)
"""A text, a class of characters, a comment or the name of a rule."""


def in_lark(text: str) -> str:
    """Return a grammar in the syntax of Lark, also of one in that of llama.cpp (GBNF). Raises ValueError."""
    if not _RULE.search(text):
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(_ESCAPE.sub(_plain_escape, _without_start(text))))
    except Exception as error:  # of any type: it only reads the text
        raise ValueError(f"{error}, where it was read as GBNF") from None


def _without_start(text: str) -> str:
    """Rename a rule `start` of GBNF, where the first rule is `root`: in Lark that is the name of the first rule."""
    other = next(name for number in count() if (name := f"start{number}") not in text)
    return _TOKEN.sub(lambda token: other if token[0] == "start" else token[0], text)


def _plain_escape(escape: re.Match[str]) -> str:
    """Write an escape sequence of GBNF so that llguidance keeps its meaning, in a text and in a class.

    It drops zeros at the beginning of a number, and takes brackets in classes only.
    """
    digits, bracket = escape[1] or escape[2], escape[3]
    if not (digits or bracket):
        return escape[0]
    code = int(digits, 16) if digits else ord(bracket)
    return f"\\x{code:02x}" if code < 0x100 else chr(code)
