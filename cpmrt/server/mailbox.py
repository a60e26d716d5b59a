"""What the engine thread has for one HTTP request, until the request takes it. Lives on the event loop alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cpmrt.engine import GenerationStats
from cpmrt.generation import Piece


@dataclass(frozen=True)
class Ended:
    """The last thing that comes for a choice. `reason`: "stop", "length", "cancelled" or, with `error`, "error".

    Seconds are from the request's arrival: in the queue, and to the first token (0 without one).
    """

    reason: str
    stats: GenerationStats
    queued_s: float = 0.0
    first_token_s: float = 0.0
    error: Exception | None = None


Item = tuple[int, Piece | Ended]
"""The number of the choice, and what came for it."""


class Mailbox:
    """Items in the order they came. A reader that takes its time holds up nobody: they wait here.

    What may wait is bounded by the tokens of the answer, which the context bounds.
    """

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Add an item and wake the reader."""
        self._items.append(item)
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    @property
    def has_items(self) -> bool:
        return bool(self._items)

    async def wait(self) -> None:
        """Until there is something to take. One reader only."""
        if not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def take(self) -> list[Item]:
        """Everything that has come; empty if nothing has."""
        items, self._items = self._items, []
        return items
