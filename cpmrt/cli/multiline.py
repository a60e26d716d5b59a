"""Reads messages of several lines, typed or piped: between triple quotes, or with a backslash at a line's end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

QUOTES = '"""'


def is_open(text: str) -> bool:
    """Whether a message goes on after this text: its triple quotes are still open, or it ends with a backslash."""
    start = text.strip()
    if start.startswith(QUOTES):
        return len(start) < 2 * len(QUOTES) or not start.endswith(QUOTES)
    return text.endswith("\\")


def unquoted(text: str) -> str:
    """Return the message without the triple quotes around it."""
    start = text.strip()
    if not start.startswith(QUOTES):
        return text
    return start.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")


def messages(lines: Iterable[str]) -> Iterator[str]:
    """Yield the messages that these lines form. The last message ends with the lines, even if it is still open."""
    begun: str | None = None
    for line in lines:
        line = line.removesuffix("\n").removesuffix("\r")
        begun = line if begun is None else f"{begun}\n{line}"
        if not is_open(begun):
            yield unquoted(begun)
            begun = None
        elif not begun.lstrip().startswith(QUOTES):
            begun = begun.removesuffix("\\")
    if begun is not None:
        yield unquoted(begun)
