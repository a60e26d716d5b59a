"""Listeners that are called with the engine's steps while a command runs: a progress line, a step log, Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING

from cpmrt.engine.engine import StepListener
from cpmrt.engine.step_log import StepLog
from cpmrt.errors import CpmrtError, reason_of
from cpmrt.executor import Prefill, Step, StepResult

if TYPE_CHECKING:
    from rich.progress import Progress


def tell(*listeners: StepListener) -> StepListener:
    """Return one listener that calls all of these in their order."""

    def listener(step: Step, result: StepResult) -> None:
        for each in listeners:
            each(step, result)

    return listener


@contextmanager
def step_log(path: str) -> Iterator[StepListener]:
    """Yield a listener that writes a step log, replacing the file. Raises CpmrtError if it cannot be written."""
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed below, with its errors named
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    log = StepLog(file)

    def listener(step: Step, result: StepResult) -> None:
        try:
            log(step, result)
        except OSError as error:
            raise _unwritable(path, error) from error

    try:
        yield listener
    finally:
        with suppress(OSError):  # every record was flushed: an error here has been raised before
            file.close()


class PrefillProgress:
    """Shows a progress line on the terminal while a prompt is prefilled, and removes it before the answer begins."""

    def __init__(self) -> None:
        self._display: Progress | None = None
        self._started_at = 0.0

    def start(self, num_tokens: int) -> None:
        """Show the line for a prompt of `num_tokens`."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        label, rate = TextColumn("reading the prompt"), TextColumn("{task.fields[rate]}")
        self._display = Progress(
            label, BarColumn(), MofNCompleteColumn(), rate, console=Console(stderr=True), transient=True
        )
        self._display.add_task("prefill", total=num_tokens, rate="")
        self._started_at = perf_counter()
        self._display.start()

    def __call__(self, step: Step, result: StepResult) -> None:
        if self._display is None or not isinstance(step, Prefill):
            return
        done = step.position + len(step.token_ids)
        rate = f"{done / (perf_counter() - self._started_at):.0f} tok/s"
        self._display.update(self._display.task_ids[0], completed=done, rate=rate, refresh=True)
        if step.is_last:
            self.stop()

    def stop(self) -> None:
        """Remove the line. May be called again."""
        if self._display is not None:
            self._display.stop()
            self._display = None


class StopRequestedError(Exception):
    """Ctrl-C was pressed to stop an answer; the engine and the conversation are intact."""


class StopAtOnce:
    """Makes Ctrl-C raise StopRequestedError at once in its `with` block: for answers of an engine elsewhere."""

    requested = False

    def __enter__(self) -> StopAtOnce:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous)
        self.requested = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise StopRequestedError


class StopOnInterrupt(StopAtOnce):
    """Makes Ctrl-C in its `with` block stop the answer between two steps, which leaves the engine intact.

    A second Ctrl-C raises KeyboardInterrupt at once. As a step listener this raises StopRequestedError between the
    chunks of a prompt; between the pieces of an answer the caller has to check `requested`.
    """

    def __call__(self, step: Step, result: StepResult) -> None:
        if self.requested and isinstance(step, Prefill):
            raise StopRequestedError

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def _unwritable(path: str, error: Exception) -> CpmrtError:
    return CpmrtError(f"step log {path} cannot be written: {reason_of(error)}", fix="choose another --log-steps file")
