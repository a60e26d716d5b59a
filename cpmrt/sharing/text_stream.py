"""The stream of an answer, which is read piece by piece."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from threading import RLock
from typing import NoReturn

from cpmrt.errors import CpmrtError
from cpmrt.generation import Completion, Piece
from cpmrt.sharing.jobs import Ended, Generation, Inbox
from cpmrt.sharing.shared_engine import SharedEngine


def not_copied() -> CpmrtError:
    """Return the error of pickling or copying a stream: the answer of a copy would end with the original."""
    return CpmrtError("a stream cannot be pickled or copied", fix="keep stream.completion instead")


class TextStream(Iterator[Piece]):
    """Iterates over the pieces of one generation; of several threads that read it each piece goes to one.

    The request is cancelled when the stream is closed, when its `with` block is left, when nothing refers to the stream
    any more (as after `break` in a loop over it) and when waiting for a piece raises, as on Ctrl-C.
    """

    def __init__(self, shared: SharedEngine, job: Generation):
        self._shared, self._job, self._inbox = shared, job, Inbox()
        self._is_over, self._reading = False, RLock()
        shared.submit((job,), self._inbox)
        self._cancel = weakref.finalize(self, shared.cancel, (job,))
        self._cancel.atexit = False

    def __next__(self) -> Piece:
        with self._reading:
            if self._is_over:
                raise StopIteration
            try:
                _, part = self._shared.next(self._inbox)
            except BaseException as error:
                self.close()
                if isinstance(error, StopIteration):  # it would end a loop over the stream as a whole answer does
                    raise RuntimeError("a listener raised StopIteration") from error
                raise
            self._job.read(part)
            if isinstance(part, Ended):
                self._is_over = True
                self._cancel.detach()
                raise part.error or StopIteration
            return part

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise not_copied()

    def close(self) -> None:
        """Cancel the request if it still runs. May be called again."""
        self._is_over = True
        self._cancel()

    @property
    def completion(self) -> Completion:
        """Everything that has been read so far; its reason is "cancelled" unless that is the whole answer."""
        return self._job.completion

    def finish(self) -> Completion:
        """Read to the end and return the whole completion."""
        for _ in self:
            pass
        return self.completion
