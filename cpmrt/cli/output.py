"""The output of commands: text and tables go to standard output, remarks to standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, TextIO

from cpmrt.errors import CpmrtError, reason_of

if TYPE_CHECKING:
    from cpmrt.config import SamplingDefaults, SamplingParams
    from cpmrt.engine import GenerationStats
    from cpmrt.generation import Completion


def write(text: str) -> None:
    """Write to standard output at once. Raises BrokenPipeError, or CpmrtError on a full disk and the like."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise CpmrtError(f"standard output cannot be written: {reason_of(error)}") from error


_REMARKS = {"are shown": True}


def show_remarks(are_shown: bool) -> None:
    """Set whether remarks (`note`) are shown from now on or dropped (--quiet)."""
    _REMARKS["are shown"] = are_shown


def note(text: str) -> None:
    """Write one remark to standard error, unless --quiet drops remarks."""
    if _REMARKS["are shown"]:
        complain(text)


def reply(text: str) -> None:
    """Write the reply to a chat command to standard error; --quiet does not drop it."""
    complain(text)


def complain(text: str) -> None:
    """Write an error or a warning to standard error; --quiet does not drop it.

    If it cannot be written, as on a full disk, it is lost, so that this ends no answer and no server.
    """
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def discard_unwritten_remarks() -> None:
    """Drop what standard error does not take: else the interpreter would fail at exit, with its own exit code."""
    try:
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def discard_stdout() -> None:
    """Drop what is still buffered for standard output: else the interpreter would complain about it at exit."""
    _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def printable(text: str) -> str:
    """Escape control characters: a name in a file must not steer the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def plain_error_line(error: Exception) -> str:
    """Return the line that tells of an error as it is; `option_names.error_line` puts the names of options into it."""
    return f"cpmrt: error: {printable(str(error))}"


def write_json(value: Any) -> None:
    """Write one JSON object and a newline; infinities and NaN, which JSON lacks, become null."""
    write(json.dumps(_finite(value), indent=2 if sys.stdout.isatty() else None) + "\n")


def write_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> None:
    """Write rows in aligned columns: on a terminal by rich, which folds long cells, elsewhere one line per row."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _write_rich(rows, header)
        return
    every = [list(header), *rows] if header else rows
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in every)
    write("".join(f"{line.rstrip()}\n" for line in lines))


def _write_rich(rows: Sequence[Sequence[str]], header: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(header), pad_edge=False, header_style="bold")
    for index in range(len(rows[0]) if rows else len(header)):
        table.add_column(header[index] if header else "", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def sampling_line(params: SamplingParams, own: SamplingDefaults) -> str:
    """Return one line about how answers are sampled: all values, the options given, and the source of the rest."""
    chosen = params.with_defaults(own)
    names = [field.name for field in fields(own) if hasattr(chosen, field.name)]
    used = replace(own, **{name: getattr(chosen, name) for name in names})
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(params, name) is not None]
    return f"{used} ({', '.join([*given, own.source])})"


def summary(completion: Completion) -> str:
    """Return what a generation cost, on one line."""
    stats = completion.stats
    parts = [
        _cost("prompt", stats.prompt_tokens, stats.prefill_s, stats.prefill_tokens_per_s),
        _cost("new", stats.new_tokens, stats.decode_s, stats.decode_tokens_per_s),
        f"finish: {completion.finish_reason}",
    ]
    if stats.mean_accept_length is not None:
        parts.append(f"mean accept length {stats.mean_accept_length:.2f}")
    return ", ".join(parts)


def _cost(what: str, count: int, seconds: float, rate: float) -> str:
    """Return the count, time and rate of some tokens as text; a zero `rate` (the first new token alone) is left out."""
    tokens = f"{what} {count} token{'s' if count != 1 else ''}"
    return f"{tokens} in {seconds:.2f} s ({rate:.1f} tok/s)" if rate else tokens


def cost_lines(completion: Completion) -> list[str]:
    """Return the summary, followed by lines about speculation if there were speculative steps."""
    return [summary(completion), *_speculation_lines(completion.stats)]


def _speculation_lines(stats: GenerationStats) -> list[str]:
    steps = stats.speculative_steps
    if not steps:
        return []
    shares = [f"{number}: {count / steps:.0%}" for number, count in enumerate(stats.accept_histogram, 1) if count]
    lines = [
        f"speculative steps {steps}, of {stats.new_tokens - 1 - stats.speculative_tokens + steps} decode steps; "
        f"by the tokens they gave {', '.join(shares)}"
    ]
    if stats.accept_rates:
        rates = [f"{depth}: {rate:.0%}" for depth, rate in enumerate(stats.accept_rates, 1)]
        lines.append(f"accept rate by depth {', '.join(rates)}")
    if stats.draft_ms is not None:
        lines.append(
            f"a speculative step: draft {stats.draft_ms:.3f} ms, verify {stats.verify_ms:.3f} ms, "
            f"rest {stats.rest_ms:.3f} ms (measured at start)"
        )
    return lines
