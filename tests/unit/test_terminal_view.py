"""Streamed text on a terminal, cut into pieces anywhere: all words are shown, and shown whole."""

from __future__ import annotations

import contextlib
import io

import pyte
import pytest
from drawing import examples
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from cpmrt.cli.conversation import Part
from cpmrt.cli.terminal_view import TerminalView, WrappedLines, made_up

WIDTH, HEIGHT = 24, 12
PIECES = ["word ", "a", " ", "  ", "\n", "\n\n", "longerword", "x" * 40, "你好", "é", "\t", "**b**", "`c`", "- ", "# ",
          "```\n", "```py\n", "| a | b |\n|---|---|\n", "<b>", "1. "]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
cuts = st.lists(st.integers(0, 300), max_size=20)


def pieces(text, places):
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def screen_after(written: str) -> list[str]:
    screen = pyte.HistoryScreen(WIDTH, HEIGHT, history=5000)
    pyte.Stream(screen).feed(written.replace("\n", "\r\n"))
    gone = ["".join(line[x].data for x in range(WIDTH)) for line in screen.history.top]
    return [line.rstrip() for line in (*gone, *screen.display)]


def shown(text, places, **options) -> str:
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, height=HEIGHT, force_terminal=True, color_system=None, highlight=False)
    with contextlib.redirect_stdout(out):
        view = TerminalView(console, **options)
        for piece in pieces(text, places):
            view.show(Part(piece))
        view.end()
    return out.getvalue()


@given(texts, cuts)
def test_no_word_is_lost_or_broken(text, places):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        lines = WrappedLines(Console(file=out), WIDTH)
        for piece in pieces(text, places):
            lines.push(piece)
        lines.flush()
    written = out.getvalue().split("\n")
    assert "".join(out.getvalue().split()) == "".join(text.split())
    assert all(cell_len(line) < WIDTH for line in written)
    assert lines.num_rows == len(written) - 1 and lines.column == cell_len(written[-1])
    if all(word.isascii() and len(word) < WIDTH for word in text.split()):
        assert out.getvalue().split() == text.split()


def test_an_accent_stays_with_its_letter_where_a_long_word_is_broken():
    letters = "e\u0301" * (2 * WIDTH)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        lines = WrappedLines(Console(file=out), WIDTH)
        lines.push(letters)
        lines.flush()
    written = out.getvalue().split("\n")
    assert "".join(written) == letters and [line[0] for line in written] == ["e"] * 3


@examples(40)
@given(texts, cuts)
def test_the_screen_is_the_same_wherever_the_text_is_cut(text, places):
    assert screen_after(shown(text, places)) == screen_after(shown(text, []))


@examples(40)
@given(texts, cuts)
@example("| a | b |\n|---|---|\n| c | d | e |\n", [])
def test_made_up_blocks_leave_nothing_of_their_source_on_the_screen(text, places):
    """The letters on the screen are those of the text: none is lost and none appears twice."""
    letters = [char for char in "".join(screen_after(shown(text, places))) if char.isalpha()]
    hidden = "py" * text.count("```py")
    assert len(letters) >= sum(char.isalpha() for char in text) - len(hidden)
    assert len(letters) <= sum(char.isalpha() for char in text)


def test_tables_are_made_up():
    lines = screen_after(shown("| a | b |\n|---|---|\n| c | d |\n", []))
    assert any(line.split() == ["c", "d"] for line in lines) and not any("|" in line for line in lines)


def test_html_and_line_breaks_stay():
    console = Console(file=io.StringIO(), width=40)
    with console.capture() as capture:
        console.print(made_up("roses\nList<int> <b>x</b> **bold**"))
    assert [line.rstrip() for line in capture.get().splitlines()] == ["roses", "List<int> <b>x</b> bold"]


@pytest.mark.parametrize("text", ["def __init__(self):\n    a * b * c\n\n    x\n", "plain\n  text"])
def test_text_without_markdown_is_left_alone(text):
    assert screen_after(shown(text, []))[: text.count("\n") + 1] == [line.rstrip() for line in f"{text}".split("\n")]
