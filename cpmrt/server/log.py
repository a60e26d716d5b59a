"""The server's log: lines are written by a thread of its own, so that whoever reads them slowly holds up nobody."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Full, Queue
from time import monotonic
from typing import Any

_MAX_LINES = 4096
_LAST_WORDS_S = 1.0
_REPEAT_S = 60.0
_log = logging.getLogger("cpmrt.server")


class LogWriter(logging.Handler):
    """Writes records to a file descriptor. Lines for which there is no room are dropped, and their number is written.

    It uses the descriptor itself and not a Python stream, whose lock a write that never ends would keep for ever.
    """

    def __init__(self, descriptor: int, max_lines: int = _MAX_LINES):
        super().__init__()
        self._descriptor = descriptor
        self._records: Queue[logging.LogRecord | None] = Queue(max_lines)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="cpmrt-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what is left, for a second at most."""
        with suppress(Full):
            self._records.put(None, timeout=_LAST_WORDS_S)
        self._thread.join(_LAST_WORDS_S)
        super().close()

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            lines = [f"{dropped} lines of the log were dropped: nobody read them"] * bool(dropped)
            try:
                lines.append(self.format(record))
            except Exception:
                self.handleError(record)
            self._write("".join([line + "\n" for line in lines]).encode("utf-8", "replace"))

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # a closed pipe: nobody wants the log
            while data:
                data = data[os.write(self._descriptor, data) :]


class LoopErrors:
    """Logs errors of the event loop, such as connections that cannot be accepted, each message once a minute."""

    def __init__(self, clock: Callable[[], float] = monotonic):
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Take an error as `loop.set_exception_handler` gives it."""
        error, message = context.get("exception"), str(context.get("message"))
        now = self._clock()
        if now - self._logged_at.get(message, -_REPEAT_S) < _REPEAT_S:
            return
        self._logged_at[message] = now
        expected = isinstance(error, OSError)
        _log.error("%s: %s", message.partition("\n")[0], error, exc_info=None if expected else error)
