"""A progress bar for calls with many prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, TextIO

from cpmrt.sharing.jobs import Generation, Job


class _Shown:
    """A text file that drops what it cannot write, as after its terminal has gone: a bar must cost nobody an answer."""

    def __init__(self, file: TextIO):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._file.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[Job], None]]:
    """Show on standard error how many of `total` generations have ended; yield a function to call with each."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    begun, num_tokens = perf_counter(), 0
    file: Any = None if sys.stderr is None else _Shown(sys.stderr)
    with Progress(*columns, console=Console(stderr=True, file=file)) as bar:
        task = bar.add_task("", total=total, rate="")

        def note(job: Job) -> None:
            nonlocal num_tokens
            assert isinstance(job, Generation)
            num_tokens += len(job.sequence.token_ids)
            bar.update(task, advance=1, rate=f"{num_tokens / (perf_counter() - begun):.0f} tok/s")

        yield note
