"""The sequences of one HTTP request, from the queue to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from cpmrt.engine import Request
from cpmrt.server.engine_thread import EngineThread, Job
from cpmrt.server.errors import ApiError, as_api_error, unavailable
from cpmrt.server.json_body import ClientGoneError
from cpmrt.server.mailbox import Ended, Item, Mailbox

Receive = Callable[[], Awaitable[Any]]


class Exchange:
    """Runs `requests`, one for each choice, of which `num_choices` in a row share a prompt. Use it as `async with`.

    `shown_ids` are special tokens that the text keeps.

    While it is open somebody watches the connection: a client that goes away cancels everything.
    Raises ApiError 429 or 503 at once if the requests cannot be queued.
    """

    def __init__(
        self,
        engine: EngineThread,
        requests: list[Request],
        num_choices: int,
        receive: Receive,
        shown_ids: frozenset[int] = frozenset(),
    ):
        self._engine, self._num_choices, self._receive = engine, num_choices, receive
        self._mailbox = Mailbox()
        self._jobs = tuple(Job(request, self._mailbox, choice, shown_ids) for choice, request in enumerate(requests))
        self.ended: dict[int, Ended] = {}
        """Choices that have ended, by number."""
        self._client_is_gone = False
        self._watcher: asyncio.Task[None] | None = None
        engine.submit(self._jobs)

    async def __aenter__(self) -> Exchange:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._engine.cancel(self._jobs)
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return len(self.ended) == len(self._jobs)

    async def items(self) -> list[Item]:
        """What has come since the last call, at least one item.

        Raises ApiError if a sequence failed or the server stops it, ClientGoneError if nobody waits for it any more.
        """
        await self._mailbox.wait()
        items = self._mailbox.take()
        for choice, item in items:
            if isinstance(item, Ended):
                self.ended[choice] = item
                self._check(item)
        return items

    @property
    def has_items(self) -> bool:
        """Whether `items` would return at once."""
        return self._mailbox.has_items

    async def wait_first(self, timeout_s: float) -> None:
        """Until the first item is there, or the time is over."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._mailbox.wait(), timeout_s)

    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; a prompt counts once however many choices it has."""
        prompts = [self.ended[choice].stats for choice in sorted(self.ended) if choice % self._num_choices == 0]
        prompt = sum(stats.prompt_tokens for stats in prompts)
        completion = sum(ended.stats.new_tokens for ended in self.ended.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(stats.cached_tokens for stats in prompts)},
        }

    def _check(self, ended: Ended) -> None:
        if ended.reason == "error":
            assert ended.error is not None
            raise as_api_error(ended.error)
        if ended.reason == "cancelled":
            raise ClientGoneError if self._client_is_gone else self._stopped()

    def _stopped(self) -> ApiError:
        return unavailable("the server is shutting down")

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_is_gone = True
        self._engine.cancel(self._jobs)
