"""Reads the prompt of `cpmrt generate` from exactly one of argument, file, token ids and piped input."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cpmrt.cli.parser import UsageError
from cpmrt.errors import RequestError, reason_of

MAX_PROMPT_BYTES = 64 * 2**20


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add PROMPT, --prompt-file and --prompt-ids."""
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue (default: piped input)")
    parser.add_argument("--prompt-file", metavar="FILE", help="take the prompt from this file, as it is; - is stdin")
    parser.add_argument(
        "--prompt-ids", type=_token_ids, metavar="IDS", help="take token ids such as 1,15,27 for the prompt"
    )


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """Return the prompt's text, nothing stripped, or its token ids. Raises UsageError, RequestError."""
    sources = {"PROMPT": args.prompt, "--prompt-file": args.prompt_file, "--prompt-ids": args.prompt_ids}
    given = {name: value for name, value in sources.items() if value is not None}
    if len(given) > 1:
        raise UsageError(f"the prompt is given more than once ({' and '.join(given)}): give one of them")
    if args.prompt_ids is not None:
        ids: list[int] = args.prompt_ids
        return ids
    if args.prompt is not None:
        return str(args.prompt)
    if args.prompt_file not in (None, "-"):
        return _read_file(Path(args.prompt_file))
    if args.prompt_file == "-" or (sys.stdin is not None and not sys.stdin.isatty()):
        text = _read_stdin()
        if text:
            return text
    raise UsageError("there is no prompt: give PROMPT or --prompt-file, or pipe text in; see cpmrt generate --help")


def decoded(raw: bytes, source: str) -> str:
    """Return UTF-8 bytes as text. Raises RequestError, naming the `source`."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source} is not UTF-8 text: byte {error.start} cannot be decoded",
            fix="convert it, for instance with iconv -t UTF-8",
        ) from error


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_PROMPT_BYTES + 1)
    except (OSError, ValueError) as error:
        raise RequestError(f"prompt file {path} cannot be read: {reason_of(error)}") from error
    return checked(raw, f"prompt file {path}")


def _read_stdin() -> str:
    if sys.stdin is None:
        return ""
    return checked(sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1), "standard input")


def checked(raw: bytes, source: str) -> str:
    """Return bytes, of which one more than MAX_PROMPT_BYTES was asked for, as text. Raises RequestError."""
    if len(raw) > MAX_PROMPT_BYTES:
        raise RequestError(f"{source} is too large for a prompt", expected=f"at most {MAX_PROMPT_BYTES} bytes")
    return decoded(raw, source)


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected token ids such as 1,15,27, got {text[:80]!r}") from error
