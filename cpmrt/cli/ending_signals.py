"""Makes SIGTERM and SIGHUP end a command the way Ctrl-C does, so that it leaves nothing half made behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Raise SystemExit in the block at the first SIGTERM or SIGHUP, with the exit code that shells expect.

    Later ones are ignored until the block ends, as a closed terminal sends several. A signal whose handling was changed
    before the block (nohup ignores SIGHUP) keeps that. Only the main thread takes signals.
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
