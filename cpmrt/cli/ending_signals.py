"""SIGTERM and SIGHUP while a command runs: it ends as it does after Ctrl-C, and nothing half made stays behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """While the block runs, the first of these signals raises SystemExit there, with the exit code that shells expect.

    Those that follow are ignored until the block ends: a closed terminal sends several. So is one that was ignored
    before (nohup).
    """
    is_main = threading.current_thread() is threading.main_thread()
    taken = [number for number in _NUMBERS if is_main and signal.getsignal(number) is signal.SIG_DFL]

    def leave(number: int, frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
