"""Messages of several lines against the sentence that defines them, at every size."""

from __future__ import annotations

from itertools import product
from time import perf_counter

import pytest

from cpmrt.cli.multiline import QUOTES, is_open, messages, unquoted
from cpmrt.errors import RequestError


def line_by_line(lines):
    """Yield the messages as their definition has them: it looks at the whole message behind every line."""
    begun = None
    for line in lines:
        begun = line if begun is None else f"{begun}\n{line}"
        if not is_open(begun):
            yield unquoted(begun)
            begun = None
        elif not begun.lstrip().startswith(QUOTES):
            begun = begun.removesuffix("\\")
    if begun is not None:
        yield unquoted(begun)


LINES = ("", "a", "\\", "a\\", " \\", '"""', '"""a', ' """a\\', 'a"""', 'a"""\\', '"""a"""', '""')


@pytest.mark.parametrize("count", range(5))
def test_messages_are_the_definitions(count):
    """All messages of so many lines, from lines with and without marks at either end."""
    for lines in product(LINES, repeat=count):
        found = list(messages(f"{line}\n" for line in lines))
        assert found == list(line_by_line(lines)), lines


@pytest.mark.parametrize("line", ["x" * 40, "x" * 40 + "\\"], ids=["quotes", "backslashes"])
def test_a_message_of_many_lines_is_read_in_linear_time(line):
    count = 100_000
    lines = [f"{line}\n"] * count
    begun = perf_counter()
    (message,) = messages([f"{QUOTES}\n", *lines, f"{QUOTES}\n"] if line.endswith("x") else lines)
    assert perf_counter() - begun < 5, "line by line it takes minutes"
    assert message.rstrip("\\\n") == "\n".join(["x" * 40] * count)


def test_a_message_without_end_is_refused():
    assert list(messages(['"""abc\n', 'de"""\n', "f\n"], limit=12)) == ["abc\nde", "f"]
    with pytest.raises(RequestError, match="at most 11 characters"):
        list(messages(['"""abc\n', 'de"""\n'], limit=11))
