"""Keeps Ctrl-C from striking in the middle of the engine's bookkeeping."""

from __future__ import annotations

# The functions of the signal module turn numbers into enums and back, which takes 20 us; those of _signal take 1 us.
import _signal  # type: ignore[import-not-found]
from signal import SIGINT, default_int_handler
from threading import get_ident, main_thread
from types import FrameType


class HeldInterrupt:
    """While its `with` block runs in the main thread, the first Ctrl-C only sets `requested`; a second one interrupts.

    At the end of the block it raises the KeyboardInterrupt that was held. It does nothing in other threads, and where
    the program handles SIGINT in its own way.
    """

    requested = False

    def __enter__(self) -> HeldInterrupt:
        is_main = get_ident() == main_thread().ident
        self._holds = is_main and _signal.getsignal(SIGINT) is default_int_handler
        if self._holds:
            _signal.signal(SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._holds:
            if _signal.getsignal(SIGINT) == self._note:  # else a listener has set a handler meanwhile
                _signal.signal(SIGINT, default_int_handler)
            if self.requested and kind is None:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
