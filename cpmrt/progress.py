"""A progress bar for calls with many prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from cpmrt.sharing.jobs import Generation, Job


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[Job], None]]:
    """Show on standard error how many of `total` generations have ended; yield a function to call with each."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    begun, num_tokens = perf_counter(), 0
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, rate="")

        def note(job: Job) -> None:
            nonlocal num_tokens
            assert isinstance(job, Generation)
            num_tokens += len(job.sequence.token_ids)
            bar.update(task, advance=1, rate=f"{num_tokens / (perf_counter() - begun):.0f} tok/s")

        yield note
