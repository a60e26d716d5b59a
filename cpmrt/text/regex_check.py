"""Checks that matching a regular expression of a tokenizer cannot take for ever.

The `tokenizers` library matches by backtracking (Oniguruma, Ruby's syntax). Exponential time is taken by a repetition
of something that can match the same text in several ways, and by a long row of optional parts. A part that follows two
long parts, and fails, is tried for each pair of their lengths. Patterns of tokenizers have none of that:
`'s|'t| ?\\p{L}+|\\s+(?!\\S)|\\s+`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

MAX_LENGTH = 8192
MAX_VARIABLE = 5
"""The most parts of one alternative that may vary in length."""
MAX_LONG = 3
"""The most parts of one alternative that may be long (more than `_LONG` repetitions)."""
MAX_RETRIED = 1
"""The most long parts before a part that can fail: the time to fail at one place in a text is the text's length to
this power."""
_LONG = 3
"""The most repetitions of a part that counts as short."""
_GROUP = re.compile(r"\((?!\?|\*)|\(\?(?:[im]*(?:-[im]+)?:|[=!>]|<[=!]|<[A-Za-z_]\w*>)")
_LOOK = re.compile(r"\(\?<?[=!]")
_PLACES = ("^", "$", r"\b", r"\B", r"\A", r"\z", r"\Z", r"\G")
"""Patterns that match a position in a text, and no character."""
_OPTION = re.compile(r"\(\?[im]+\)")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?[\w =-]{1,40}\}|x\{[0-9A-Fa-f]{1,8}\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[^\dkgKRXpPxu])", re.DOTALL
)
_QUANTIFIER = re.compile(r"([*+?])[?+]?|\{(\d{0,5})(,?)(\d{0,5})\}\??")


class UnsafeRegexError(ValueError):
    """A regular expression that may take too long, or that is more than tokenizers use."""


@dataclass(frozen=True)
class _Shape:
    """Bounds for a part of a pattern, the worst of its alternatives.

    `variable`, `long`: how many of its parts vary in length, and how many can be long. `retried`: how many long parts
    are tried again with other lengths when a later part fails. `has_choice`: it has alternatives. `fewest`: the fewest
    characters that it matches.
    """

    variable: int = 0
    long: int = 0
    retried: int = 0
    can_fail: bool = False
    has_choice: bool = False
    fewest: int = 0

    def then(self, other: _Shape) -> _Shape:
        return _Shape(
            self.variable + other.variable,
            self.long + other.long,
            (self.long if other.can_fail else self.retried) + other.retried,
            self.can_fail or other.can_fail,
            self.has_choice or other.has_choice,
            self.fewest + other.fewest,
        )

    def either(self, other: _Shape) -> _Shape:
        return _Shape(
            max(self.variable, other.variable),
            max(self.long, other.long),
            max(self.retried, other.retried),
            self.can_fail and other.can_fail,
            True,
            min(self.fewest, other.fewest),
        )

    def repeated(self, least: int, most: int) -> _Shape:
        return replace(
            self,
            variable=self.variable + int(least != most),
            long=self.long + int(most > _LONG),
            can_fail=self.can_fail and least > 0,
            fewest=self.fewest * least,
        )

    def looked_around(self) -> _Shape:
        """Return the shape of a look-around, which matches no character and begins anew at each place."""
        return replace(self, retried=self.long, can_fail=True, fewest=0)


def check_regex(pattern: str) -> int:
    """Return the fewest characters that a pattern matches.

    Raises UnsafeRegexError, with the reason, for a pattern that may take exponential time or has unknown syntax.
    """
    if len(pattern) > MAX_LENGTH:
        raise UnsafeRegexError(f"it has more than {MAX_LENGTH} characters")
    scanner = _Scanner(pattern)
    shape = scanner.alternatives()
    if scanner.at < len(pattern):
        raise UnsafeRegexError("it closes a group that it has not opened")
    if shape.variable > MAX_VARIABLE or shape.long > MAX_LONG or shape.retried > MAX_RETRIED:
        raise UnsafeRegexError("too many parts that follow each other can be of any length")
    return shape.fewest


class _Scanner:
    """Reads a pattern from left to right; `at` is the index of the next character."""

    def __init__(self, pattern: str):
        self.pattern, self.at, self._depth = pattern, 0, 0

    def alternatives(self) -> _Shape:
        """Read up to the end of the pattern or the bracket that closes the group, and return the shape of that."""
        shape = self._sequence()
        while self._peek() == "|":
            self.at += 1
            shape = shape.either(self._sequence())
        return shape

    def _sequence(self) -> _Shape:
        shape = _Shape()
        while self._peek() not in ("", "|", ")"):
            shape = shape.then(self._quantified(self._atom()))
        return shape

    def _atom(self) -> _Shape:
        char, start = self._peek(), self.at
        if char == "(":
            return self._group()
        if char == "[":
            self._char_class()
        elif char == "\\":
            self._take(_ESCAPE, "an escape that tokenizers do not use")
        elif _QUANTIFIER.match(self.pattern, self.at):
            raise UnsafeRegexError("a repetition of a repetition, or of nothing")
        else:
            self.at += 1
        return _Shape(can_fail=True, fewest=int(self.pattern[start : self.at] not in _PLACES))

    def _group(self) -> _Shape:
        if self.at == 0 and (option := _OPTION.match(self.pattern)):
            self.at = option.end()  # allowed at the start only: elsewhere it would regroup the alternatives after it
            return _Shape()
        looks_around = _LOOK.match(self.pattern, self.at)
        self._take(_GROUP, "a kind of group that tokenizers do not use")
        self._depth += 1
        if self._depth > 50:
            raise UnsafeRegexError("groups are nested too deeply")
        shape = self.alternatives()
        if self._peek() != ")":
            raise UnsafeRegexError("a group without an end")
        self.at, self._depth = self.at + 1, self._depth - 1
        return shape.looked_around() if looks_around else shape

    def _char_class(self) -> None:
        depth = 0
        while self.at < len(self.pattern):
            char = self.pattern[self.at]
            if char == "\\":
                self._take(_ESCAPE, "an escape that tokenizers do not use")
                continue
            self.at += 1
            if char == "[":
                depth += 1
                self.at += self._peek() == "^"
                self.at += self._peek() == "]"  # as the first character of a class it stands for itself
            elif char == "]":
                depth -= 1
                if depth == 0:
                    return
        raise UnsafeRegexError("a character class without an end")

    def _quantified(self, shape: _Shape) -> _Shape:
        found = _QUANTIFIER.match(self.pattern, self.at)
        if found is None or found[0] == "{}" or (found[3] and not (found[2] or found[4])):
            return shape
        self.at = found.end()
        least, most = _limits(found)
        if most > 1 and (shape.variable or shape.has_choice):
            raise UnsafeRegexError("a repetition of what can match in several ways")
        return shape.repeated(least, most)

    def _take(self, wanted: re.Pattern[str], otherwise: str) -> None:
        found = wanted.match(self.pattern, self.at)
        if found is None:
            raise UnsafeRegexError(otherwise)
        self.at = found.end()

    def _peek(self) -> str:
        return self.pattern[self.at : self.at + 1]


def _limits(quantifier: re.Match[str]) -> tuple[int, int]:
    """Return the fewest and the most repetitions; 10**6 stands for any number."""
    sign, low, comma, high = quantifier.groups()
    if sign:
        return (1 if sign == "+" else 0), (1 if sign == "?" else 10**6)
    least = int(low or 0)
    return least, int(high) if high else 10**6 if comma else least
