"""Work that reads prompts and generates nothing, such as scores and embeddings, in threads of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from cpmrt.server.errors import overloaded, shutting_down
from cpmrt.server.json_body import ClientGoneError, Receive, client_left

_THREADS = 4
_Ended = asyncio.Future[asyncio.Future[None]]
"""Is done with the call of a thread that has ended."""


class PromptWork(Protocol):
    """The work of one request that only reads prompts."""

    def run(self) -> None:
        """Do all of it, in the calling thread."""

    def cancel(self) -> None:
        """Have `run` return soon, wherever it is. For any thread."""


class PromptWorkers:
    """Runs `PromptWork`; that of `max_open` requests may run or wait. All of it ends when `over` is done."""

    def __init__(self, max_open: int, over: asyncio.Future[None]):
        self._threads = ThreadPoolExecutor(_THREADS, "cpmrt-read")
        self._max_open, self._num_running = max(1, max_open), 0
        self._waiting: dict[PromptWork, _Ended] = {}
        """Work that has no thread yet -> what is done when it has ended. Unlike an executor's, it can be forgotten."""
        self._over = over

    async def run(self, work: PromptWork, receive: Receive) -> None:
        """Run work to its end. Raises its errors.

        Also raises ApiError 429 if too much is open, 503 if the server ends, ClientGoneError if the client has gone.
        """
        num_open = self._num_running + len(self._waiting)
        if num_open >= self._max_open:
            raise overloaded(num_open, "requests to read prompts")
        ended: _Ended = asyncio.get_running_loop().create_future()
        self._waiting[work] = ended
        self._use_threads()
        leaving = asyncio.ensure_future(client_left(receive))
        try:
            await asyncio.wait((ended, leaving, self._over), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise ClientGoneError if leaving.done() else shutting_down()
            ended.result().result()
        finally:
            leaving.cancel()
            self._waiting.pop(work, None)
            work.cancel()

    def _use_threads(self) -> None:
        """Give the threads that are free the work that has waited longest."""
        while self._waiting and self._num_running < _THREADS and not self._over.done():
            work = next(iter(self._waiting))
            running = asyncio.get_running_loop().run_in_executor(self._threads, work.run)
            running.add_done_callback(partial(self._note_end, self._waiting.pop(work)))
            self._num_running += 1

    def _note_end(self, ended: _Ended, running: asyncio.Future[None]) -> None:
        self._num_running -= 1
        self._use_threads()
        if not running.cancelled():
            running.exception()  # nobody else looks at it where the client is answered before
        ended.set_result(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
