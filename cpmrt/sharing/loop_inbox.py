"""An inbox on an event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from cpmrt.sharing.jobs import Item, only_ends


class LoopInbox:
    """Keeps the items for the jobs of one caller on an event loop until they are read.

    With `only_ends` the pieces of a generation are kept in the generation.
    """

    def __init__(self, *, only_ends: bool = False):
        self.loop, self._only_ends = asyncio.get_running_loop(), only_ends
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self.get = self._queue.get

    def receive(self, items: list[Item]) -> None:
        """Have the event loop take the items of one step."""
        if self._only_ends:
            items = only_ends(items)
        if items:
            with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self.loop.call_soon_threadsafe(self._take, items)

    def _take(self, items: list[Item]) -> None:
        for item in items:
            self._queue.put_nowait(item)
