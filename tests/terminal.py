"""A program on a terminal: what it shows is read off the screen of a terminal emulator (pyte)."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyte

ROOT = Path(__file__).resolve().parents[1]


class Terminal:
    """A command that runs on a terminal of a given size; leaving the `with` block kills it."""

    def __init__(self, command: Sequence[str], *, columns: int = 60, rows: int = 24, **variables: str):
        self.screen = pyte.HistoryScreen(columns, rows, history=2000)
        self._stream = pyte.ByteStream(self.screen)
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"} | variables
        for name in ("COLUMNS", "LINES"):  # pytest's worker may have the size of another terminal there
            env.pop(name, None)
        self.child = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, preexec_fn=_take_terminal
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.child.kill()
        self.child.wait()
        os.close(self._ours)

    @property
    def lines(self) -> list[str]:
        """All lines shown, those that have left the screen at the top included, without empty lines at the end."""
        columns = range(self.screen.columns)
        gone = ["".join(line[x].data for x in columns) for line in self.screen.history.top]
        shown = [line.rstrip() for line in (*gone, *self.screen.display)]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def echoes(self) -> bool:
        """Whether the terminal itself echoes what is typed."""
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def paste(self, text: str) -> None:
        """Paste `text` as terminals do, between the escape sequences of bracketed paste."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def wait(self, what: str | Callable[[], bool], seconds: float = 30) -> None:
        """Read until the text `what` is shown or the condition `what` holds; fail if that takes too long."""
        deadline = time.monotonic() + seconds
        is_there = what if callable(what) else lambda: what in self.text
        while not is_there():
            assert time.monotonic() < deadline, f"{what!r} was not shown:\n{self.text}"
            self.read(0.2)

    def wait_for_prompt(self, text: str = ">") -> None:
        """Read until the last line is the prompt."""
        self.wait(lambda: bool(self.lines) and self.lines[-1].rstrip() == text)

    def read(self, seconds: float) -> None:
        """Wait at most so many seconds for output, and feed what there is to the screen."""
        if select.select([self._ours], [], [], seconds)[0]:
            try:
                self._stream.feed(os.read(self._ours, 2**16))
            except OSError:  # the program has ended
                time.sleep(0.01)

    def end(self, seconds: float = 30) -> int:
        """Wait for the end of the program, and return its exit code."""
        deadline = time.monotonic() + seconds
        while self.child.poll() is None:
            assert time.monotonic() < deadline, f"it does not end:\n{self.text}"
            self.read(0.05)
        self.read(0.05)
        return self.child.returncode


def shown_on_terminal(start: Callable[[int], subprocess.Popen[Any]], *, columns: int = 0) -> tuple[bytes, int]:
    """Return all that a program writes to a terminal, and its exit code; `start` gets the terminal's descriptor."""
    ours, theirs = pty.openpty()
    if columns:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = start(theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # Linux raises EIO at the end of a terminal
        pass
    os.close(ours)
    return shown, process.wait(60)


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
