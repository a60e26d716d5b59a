"""Converts grammars in the syntax of llama.cpp (GBNF) to that of Lark, by llguidance's own converter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from typing import Any

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\[\]])|.)", re.DOTALL)
"""An escape sequence; the groups are the digits of a code point (\\u, \\U), or the bracket that it stands for."""
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[\w-]+', re.DOTALL)
"""One token of GBNF: a quoted text, a character class, a comment or the name of a rule."""


def in_lark(text: str) -> str:
    """Return a grammar in Lark's syntax. GBNF (known by its `::=`) is converted, other text kept. Raises ValueError."""
    if not _RULE.search(text):
        return text
    try:
        return _converted(_ESCAPE.sub(_plain_escape, _without_start(text)))
    except Exception as error:  # the converter only reads text, but may raise any type
        raise ValueError(f"{error}, where it was read as GBNF") from None


def _converted(text: str) -> str:
    """Return what the converter's own `gbnf_to_lark` does, but in a time that grows with the length of the text."""
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    rules = GrammarParser().parse(text)
    _mark_terminals(rules)
    resolve(rules)
    in_order = sorted(rules.values(), key=lambda rule: rule.order)
    return "%llguidance {}\n\n" + "\n".join(f"{rule}\n" for rule in in_order)


def _mark_terminals(rules: dict[str, Any]) -> None:
    """Mark the rules that are terminals: those that lead to terminals only, and are not the first rule.

    `resolve` would go over all rules again for each level of rules that are terminals.
    """
    unknown = dict[str, int]()
    users = dict[str, list[str]]()
    for name, rule in rules.items():
        names = [node.name for node in _nodes(rule) if hasattr(node, "target")]
        unknown[name] = len(names)
        for each in names:
            users.setdefault(each, []).append(name)
    found = [name for name, left in unknown.items() if not left and name != "root"]
    for name in found:  # more are appended meanwhile
        rules[name].rule_is_terminal = True
        for user in users.get(name, ()):
            unknown[user] -= 1
            if not unknown[user] and user != "root":
                found.append(user)


def _nodes(node: Any) -> Iterator[Any]:
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        pending += node.children()


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
