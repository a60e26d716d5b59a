"""The parser of every command line, with error messages of our own. Imports nothing slow: every start waits for it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from cpmrt.cli.output import write
from cpmrt.errors import quoted


class UsageError(Exception):
    """The command line itself is wrong; the message is one line."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line of our own wording, without argparse's usage text before it."""

    def __init__(self, **settings: Any):
        # Descriptions are module docstrings, whose lines are laid out already.
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)
        self.register("type", int, number(int, "an integer"))
        self.register("type", float, number(float, "a number"))
        self.register("type", Path, _path)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line. Raises UsageError: an unknown option is answered with the most similar known one, words
        left over after a prompt with how to quote the prompt. An action may leave its own message as `error`."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            meant = "".join(map(self._meant, options))
            if not options and getattr(parsed, "prompt", None) is not None:
                meant = f"; quote the prompt: {shlex.quote(' '.join([parsed.prompt, *unknown]))}"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        if hasattr(parsed, "error"):
            self.error(parsed.error)
        return parsed

    def _meant(self, option: str) -> str:
        """Return a hint that names the option which is meant by an unknown one; "" if there is none like it."""
        from cpmrt.keywords import ELSEWHERE  # which only this error needs

        here = "--" + ELSEWHERE.get(option[2:].replace("-", "_"), "").replace("_", "-")
        known = self._option_string_actions
        return f" (did you mean {here}?)" if here in known else nearest(option, known)

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own method hides the error when --help or --version cannot be written.
        write(message)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def nearest(word: str, words: Iterable[str]) -> str:
    """Return a hint that names the one of `words` most like `word`, or "" if none is like it."""
    found = get_close_matches(word, words, n=1, cutoff=0.7)
    return f" (did you mean {found[0]}?)" if found else ""


def number(kind: type[int] | type[float], what: str) -> Callable[[str], int | float]:
    """Return a parser for the value of a numeric option; its errors say that it expected `what`."""

    def parsed(text: str) -> int | float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {what}, got {quoted(text)}") from None

    return parsed


def _path(text: str) -> Path:
    """Parse the path of a file or folder: an empty one, as of a variable that is not set, would be this folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing on standard error but errors")
