"""Work that reads prompts and generates nothing, such as scores and embeddings, in threads of its own."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from cpmrt.server.errors import overloaded, shutting_down
from cpmrt.server.json_body import ClientGoneError, Receive, client_left

_THREADS = 4


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
        self._max_open, self._num_open = max(1, max_open), 0
        self._over = over

    async def run(self, work: PromptWork, receive: Receive) -> None:
        """Run work to its end. Raises its errors.

        Also raises ApiError 429 if too much is open, 503 if the server ends, ClientGoneError if the client has gone.
        """
        if self._num_open >= self._max_open:
            raise overloaded(self._num_open)
        self._num_open += 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, work.run)
        running.add_done_callback(self._note_end)
        leaving = asyncio.ensure_future(client_left(receive))
        try:
            await asyncio.wait((running, leaving, self._over), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ClientGoneError if leaving.done() else shutting_down()
            running.result()
        finally:
            leaving.cancel()
            work.cancel()

    def _note_end(self, running: asyncio.Future[None]) -> None:
        self._num_open -= 1
        if not running.cancelled():
            running.exception()  # nobody else looks at it where the client is answered before

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
