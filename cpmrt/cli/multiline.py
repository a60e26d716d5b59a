"""Reads messages of several lines, typed or piped: between triple quotes, or with a backslash at a line's end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cpmrt.cli.prompt_source import MAX_PROMPT_BYTES
from cpmrt.errors import RequestError

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


def messages(lines: Iterable[str], limit: int = MAX_PROMPT_BYTES) -> Iterator[str]:
    """Yield the messages that these lines form. The last message ends with the lines, even if it is still open.

    Raises RequestError for a message of more than `limit` characters.
    """
    begun, size, is_quoted, is_blank = list[str](), 0, False, True
    for line in lines:
        line = line.removesuffix("\n").removesuffix("\r")
        if is_blank:
            is_quoted, is_blank = line.lstrip().startswith(QUOTES), not line.strip().removesuffix("\\")
        begun.append(line)
        size += len(line) + 1
        if size - 1 > limit:
            raise RequestError("a message is too large for a prompt", expected=f"at most {limit} characters")
        # A message may have a million lines: it is put together only where it can end.
        may_end = line.rstrip().endswith(QUOTES) if is_quoted else not line.endswith("\\")
        if may_end and not is_open(text := "\n".join(begun)):
            yield unquoted(text)
            begun, size, is_blank = [], 0, True
        elif not is_quoted:
            begun[-1] = line.removesuffix("\\")
    if begun:
        yield unquoted("\n".join(begun))
