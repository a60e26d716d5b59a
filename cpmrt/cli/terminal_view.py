"""Shows an answer on a terminal as it comes, with lines broken between words and Markdown rendered.

A block (a paragraph or a piece of code) is first shown as plain text. When it is complete and has any Markdown in it,
its lines are replaced by the rendered Markdown.
"""

from __future__ import annotations

import re
from collections import Counter

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown
from rich.style import Style

from cpmrt.cli.conversation import Part
from cpmrt.cli.output import printable, write

_WORDS = re.compile(r"\n|[^\S\n]+|[^\s]+")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_MARKDOWN = re.compile(r"^ {0,3}(#{1,6} |[-*+] |\d{1,9}[.)] |> |```|~~~|\|.*\|)|\*\*\S|`[^`\n]+`|\]\(", re.MULTILINE)
_TAB = "    "
_THOUGHT = Style(dim=True)


class TerminalView:
    """Shows an answer on a terminal, and a waiting sign until it begins.

    With `makes_up` False, Markdown stays as the model wrote it.
    """

    def __init__(self, console: Console, *, makes_up: bool = True):
        self._console, self._makes_up = console, makes_up
        self._waiting = console.status("reading")
        self._waiting.start()
        self._is_thought = False
        self._begin_block()
        self._line = ""
        """The text of the line that is not complete yet."""
        self._fence = ""
        """The fence that closes the open code block, such as ```; "" outside of one."""

    def show(self, part: Part) -> None:
        if not part.text:
            return
        self._waiting.stop()
        if part.is_thought != self._is_thought:
            self._end_block()
            write("\n" * (2 - (self._lines.column == 0)) if self._is_thought else "")
            self._begin_block()
            self._is_thought = part.is_thought
        for text in _cleaned(part.text).splitlines(keepends=True):
            self._lines.push(text, _THOUGHT if self._is_thought else None)
            self._source += text
            self._line += text
            if text.endswith("\n"):
                if self._completes_block(self._line):
                    self._end_block()
                    self._begin_block()
                self._line = ""

    def end(self) -> None:
        self._waiting.stop()
        self._end_block()
        if self._lines.column:
            write("\n")

    def _begin_block(self) -> None:
        self._source, self._size = "", self._console.size
        self._lines = WrappedLines(self._console, self._size.width)

    def _completes_block(self, line: str) -> bool:
        fence = _FENCE.match(line)
        if self._fence:
            if fence and fence[1].startswith(self._fence) and not line[fence.end() :].strip():
                self._fence = ""
                return True
            return False
        if fence:
            self._fence = fence[1]
        return not fence and not line.strip()

    def _end_block(self) -> None:
        """Replace the block's lines on the screen by the rendered Markdown.

        They stay as they are where they scrolled off, the window changed its size, or a table would lose text.
        """
        self._lines.flush()
        height = self._lines.num_rows
        is_marked_up = self._makes_up and not self._is_thought and _MARKDOWN.search(self._source)
        if not is_marked_up or height >= self._size.height - 1 or self._console.size != self._size:
            return
        markdown = made_up(self._source)
        if any(token.type == "table_open" for token in markdown.parsed) and self._loses_letters(markdown):
            return
        write("\r" + f"\x1b[{height}A" * (height > 0) + "\x1b[J")
        self._console.print(markdown, end="")
        self._lines = WrappedLines(self._console, self._size.width)
        if self._source.endswith("\n\n"):
            write("\n")

    def _loses_letters(self, markdown: Markdown) -> bool:
        """Whether rendering loses letters of the block: tables drop cells of columns that their head does not have."""
        lines = self._console.render_lines(markdown)
        shown = Counter(char for line in lines for segment in line for char in segment.text)
        return any(count > shown[char] for char, count in Counter(self._source).items() if char.isalnum())


def made_up(source: str) -> Markdown:
    """Return the Markdown of a text for rich, with the line breaks of the source kept and HTML shown as text."""
    markdown = Markdown(source)
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    markdown.parsed = parser.parse(source)
    for token in markdown.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return markdown


class WrappedLines:
    """Writes text that comes in pieces, and begins a new line before a word that does not fit.

    A word is held back until it is complete. Wide characters (Chinese) are words of their own.
    """

    def __init__(self, console: Console, width: int):
        self._console, self._width = console, max(2, width - 1)
        self._word, self._spaces = "", ""
        self._style: Style | None = None
        self.column = 0
        """Number of terminal cells of the current line that are taken."""
        self.num_rows = 0
        """Number of line breaks that were written, both those of the text and those put in."""

    def push(self, text: str, style: Style | None = None) -> None:
        self._style = style
        for run in _WORDS.findall(text):
            if run == "\n":
                self.flush()
                self._break()
            elif run.isspace():
                self._end_word()
                self._spaces += run.replace("\t", _TAB)
            else:
                for char in run:
                    self._add(char)

    def flush(self) -> None:
        """Write the word that is held back, and drop spaces behind it."""
        self._end_word()
        self._spaces = ""

    def _add(self, char: str) -> None:
        cells = cell_len(char)  # 0 for an accent or a vowel sign, which stays with its letter
        if cells > 1 or (cells and cell_len(self._word) >= self._width):
            self._end_word()
        self._word += char
        if cells > 1:
            self._end_word()

    def _end_word(self) -> None:
        if not self._word:
            return
        needed = len(self._spaces) + cell_len(self._word)
        if self.column and self.column + needed > self._width:
            self._break()
            self._spaces = ""
        text = self._spaces[: max(0, self._width - cell_len(self._word))] + self._word
        self._write(text)
        self.column += cell_len(text)
        self._word = self._spaces = ""

    def _break(self) -> None:
        write("\n")
        self.column = 0
        self.num_rows += 1

    def _write(self, text: str) -> None:
        if self._style is not None and not self._console.no_color:
            self._console.print(text, style=self._style, end="", markup=False, highlight=False, soft_wrap=True)
        else:
            write(text)


def _cleaned(text: str) -> str:
    """Return the text with control characters escaped or dropped, so that it cannot steer the terminal."""
    return "".join(char if char in "\n\t" or char.isprintable() else _shown(char) for char in text)


def _shown(char: str) -> str:
    return "" if char == "\r" else char if ord(char) > 0x9F else printable(char)
