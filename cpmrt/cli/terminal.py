"""The terminal input of `cpmrt chat`: line editing with a history that is kept, and no echo during an answer."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from cpmrt import env
from cpmrt.cli.multiline import QUOTES, is_open, unquoted
from cpmrt.cli.output import note, printable
from cpmrt.errors import reason_of

PROMPT, CONTINUATION = "> ", ". "


def typed_messages(commands: Sequence[str]) -> Iterator[str]:
    """Yield the messages that are typed, until Ctrl-D. Raises KeyboardInterrupt when Ctrl-C is pressed twice.

    Text pasted with several lines is one message. Alt-Enter begins a new line, as triple quotes and a backslash do.
    """
    session = _session(commands)
    was_interrupted = False
    while True:
        try:
            text = session.prompt(PROMPT)
        except EOFError:
            return
        except KeyboardInterrupt:
            if was_interrupted:
                raise
            was_interrupted = True
            note("(Ctrl-C again, Ctrl-D or /bye to leave)")
            continue
        was_interrupted = False
        yield unquoted(text)


@contextmanager
def hidden_typing() -> Iterator[None]:
    """Turn the terminal's echo off until the block ends. What is typed meanwhile begins the next message."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    hidden = [*before]
    hidden[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal has been closed
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _session(commands: Sequence[str]) -> PromptSession[str]:
    # If standard output is a file or a pipe, the prompt is shown on standard error.
    output = create_output(stdout=sys.stdout if sys.stdout.isatty() else sys.stderr)
    output.enable_cpr = False  # type: ignore[attr-defined]  # terminals without it would get a warning
    return PromptSession(
        history=open_history(),
        key_bindings=_bindings(),
        multiline=True,
        prompt_continuation=CONTINUATION,
        completer=WordCompleter(list(commands), sentence=True),
        complete_style=CompleteStyle.READLINE_LIKE,
        complete_while_typing=False,
        reserve_space_for_menu=0,
        output=output,
    )


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if not is_open(buffer.text):
            buffer.validate_and_handle()
            return
        buffer.cursor_position = len(buffer.text)
        if not buffer.text.lstrip().startswith(QUOTES):
            buffer.delete_before_cursor()  # the backslash
        buffer.insert_text("\n")

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def open_history() -> History:
    """Return the history of earlier runs, kept in a file that only this user can read.

    If the file cannot be opened, say so and return a history of this run alone.
    """
    path = env.state_dir() / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.fchmod(descriptor, 0o600)
        os.close(descriptor)
    except OSError as error:
        note(f"messages typed here are not kept for later runs: {_obstacle(error, path)}")
        return InMemoryHistory()
    return _KeptHistory(str(path))


def _obstacle(error: OSError, path: Path) -> str:
    """Return why the history at `path` cannot be kept; the error may be about a folder that `path` lies in."""
    where = printable(str(error.filename or path))
    return f"{where} is not a folder" if isinstance(error, FileExistsError) else f"{where}: {reason_of(error)}"


class _KeptHistory(FileHistory):
    """A history in a file. If the file cannot be written, the line is not kept and the chat goes on."""

    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeError):
            super().store_string(string)
