"""Keeps the text that people wrote apart from the chat template's own, so that only the template writes special tokens.

While a template runs, the characters of a user's text that occur in special tokens are replaced one by one by
private-use characters, their marks. Concatenation, slices and trimming carry marks along. A filter, a method, a test or
a look-up that reads the text is given it without marks, so the template decides the same as for unmarked text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from types import GeneratorType
from typing import Any, NamedTuple

from cpmrt.errors import RequestError

_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")


class MarkedText(NamedTuple):
    """A rendered prompt in which the text that users wrote is marked. `marks` is None if nothing is marked."""

    text: str
    marks: Marks | None

    @property
    def plain(self) -> str:
        """The prompt as the template wrote it."""
        return self.text if self.marks is None else str(self.marks.removed(self.text))


class Marks:
    """A mapping between characters and their marks, for one conversation.

    `tokens` are the texts of the special tokens; white space in them is never marked, so that trimming works. `data` is
    all text that may reach the prompt: private-use characters that occur in it are not used as marks.
    Raises RequestError if too few private-use characters are left.
    """

    def __init__(self, tokens: Collection[str], data: object):
        self._tokens = any_of(tokens)
        taken = {char for text in _strings(data) for char in _PRIVATE.findall(text)}
        marked = sorted({char for token in tokens for char in token if not char.isspace()})
        free = (chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in taken and code & 0xFFFE != 0xFFFE)
        marks = list(islice(free, len(marked)))
        if len(marks) < len(marked):
            raise RequestError("messages", expected="some private-use characters that they do not use", actual="none")
        self._mark = str.maketrans(dict(zip(marked, marks, strict=True)))
        self._remove = str.maketrans(dict(zip(marks, marked, strict=True)))
        self._marks = marks

    def put(self, value: Any) -> Any:
        """Return the value with every string in it marked; a dict's key only if it contains a whole special token."""
        return _each_string(value, lambda text: text.translate(self._mark), self._with_marked_key)

    def put_on_tokens(self, value: Any, *, but: Collection[str] = ()) -> Any:
        """Return the value with the whole special tokens in its strings marked, except those listed in `but`."""

        def mark(match: re.Match[str]) -> str:
            return match[0] if match[0] in but else match[0].translate(self._mark)

        return _each_string(value, lambda text: self._tokens.sub(mark, text), self._with_marked_key)

    def removed(self, value: Any) -> Any:
        """Return the value without the marks in its strings; the same object if there are none."""
        return _each_string(value, self._without, self._without)

    def _without(self, text: str) -> str:
        # Fast for plain text: Python stores whether a text is ASCII, and `in` ends at once in a text without such high
        # characters, while a regular expression would read all of it.
        is_plain = text.isascii() or not any(mark in text for mark in self._marks)
        return text if is_plain else text.translate(self._remove)

    def _with_marked_key(self, key: str) -> str:
        return key.translate(self._mark) if self._tokens.search(key) else key

    def carried(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with arguments without marks, and return its result with marks.

        Unless the result is None, a bool or a number, the function is called with the marked arguments too. If both
        results have the same text, the marked one is returned. If not, because the function looked at marked
        characters, the whole result is marked as the user's. A generator is run to its end.
        """
        plain_args, plain_kwargs = self.removed(args), self.removed(kwargs)
        if plain_args is args and plain_kwargs is kwargs:
            return function(*args, **kwargs)
        plain = function(*plain_args, **plain_kwargs)
        if plain is None or isinstance(plain, (bool, int, float)):
            return plain
        if isinstance(plain, GeneratorType):
            return (item for item in self.carried(lambda *own, **named: list(function(*own, **named)), args, kwargs))
        try:
            carried = function(*args, **kwargs)
        except Exception:  # for instance a search that finds nothing in marked text
            return self.put(plain)
        if isinstance(plain, (str, list, tuple, dict)):
            return carried if self.removed(carried) == plain else self.put(plain)
        return carried


def _each_string(value: Any, change: Callable[[str], str], change_key: Callable[[str], str]) -> Any:
    """Return the value with its strings changed, also in lists, tuples and dicts; the same object if none changes."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        pairs = [(key, change_key(key), item, _each_string(item, change, change_key)) for key, item in value.items()]
        is_same = all(key is new_key and item is new for key, new_key, item, new in pairs)
        return value if is_same else {new_key: new for _, new_key, _, new in pairs}
    if type(value) in (list, tuple):
        items = [_each_string(item, change, change_key) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    return value


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of these texts, the longest first; without texts it matches nothing."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)")


def _strings(value: object) -> Iterator[str]:
    pending: list[object] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            pending += item
