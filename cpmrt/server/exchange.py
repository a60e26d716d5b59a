"""The sequences of one HTTP request, from the queue to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from cpmrt.server.engine_thread import EngineThread, Item, Job
from cpmrt.server.errors import as_api_error, shutting_down
from cpmrt.server.json_body import ClientGoneError, Receive, client_left
from cpmrt.server.service import Prepared
from cpmrt.sharing.jobs import Ended

PING_S = 10.0
"""How long an answer may be silent, in the queue or during a long prompt, until its client gets a sign of life."""
_MAX_ITEMS = 16
"""The most items worked on before other requests have their turn, if many wait since the client reads slowly."""


class Exchange:
    """Runs the choices of a prepared request and collects what comes for them. Use it as `async with`.

    While it is open it watches the connection: a client that goes away cancels everything. Items wait here until they
    are read, so that a slow reader holds up nobody; the tokens of the answer bound how many there can be.
    The requests are queued at once, which raises ApiError 429 or 503 if they cannot be; or, if there is a `before`,
    when that is done, which notices itself that the client leaves. Then all such errors come from `items`.
    """

    def __init__(
        self, engine: EngineThread, prepared: Prepared, receive: Receive,
        before: Callable[[], Awaitable[None]] | None = None,
    ):  # fmt: skip
        self._engine, self._num_choices, self._receive = engine, prepared.wanted.num_choices, receive
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        """Done when `items` has something to return; None while nobody waits. A future costs less than an event."""
        self._has_more = False
        self._jobs: tuple[Job, ...] = tuple(
            Job(request, prepared.shown_ids, deliver=self._put, choice=choice)
            for choice, request in enumerate(prepared.requests)
        )
        self.ended: dict[int, Ended] = {}
        """Choices that have ended, by number."""
        self._client_is_gone = False
        self._watcher: asyncio.Task[None] | None = None
        self._is_silent = True
        self._is_pinging = False
        """Whether the silence has lasted so long that `items` shall return no items, for a sign of life."""
        self._alarm: asyncio.TimerHandle | None = None
        self._before = before
        self._failure: Exception | None = None
        self.is_begun = False
        """Whether the requests are queued."""
        if before is not None:
            return
        try:
            self._begin()
        except BaseException:
            self._forget_jobs()
            raise

    async def __aenter__(self) -> Exchange:
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        self._set_alarm()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._engine.cancel(self._jobs)
        if self._alarm is not None:
            self._alarm.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        self._failure = None  # its traceback knows the exchange
        self._forget_jobs()

    @property
    def is_done(self) -> bool:
        return len(self.ended) == len(self._jobs)

    @property
    def has_items(self) -> bool:
        """True if `items` would return at once."""
        return bool(self._items) or self._is_pinging or self._failure is not None

    async def items(self) -> list[Item]:
        """Wait for at least one item, and return what has come since the last call, a part of it if it is much.

        Returns no items after a long silence. Raises ApiError if a sequence failed or the server stops it,
        ClientGoneError if the client has gone, and the errors of `before`.
        """
        if self._has_more:
            await asyncio.sleep(0)
        elif not self.has_items:
            await self._something()
        if self._failure is not None:
            raise self._failure
        items, self._items = self._items, []
        self._is_pinging = False
        self._has_more = len(items) > _MAX_ITEMS
        if self._has_more:
            items, self._items = items[:_MAX_ITEMS], items[_MAX_ITEMS:]
        for choice, item in items:
            if isinstance(item, Ended):
                self.ended[choice] = item
                self._check(item)
        return items

    async def wait_first(self, timeout_s: float) -> None:
        """Wait until the first item is there, or the time is over."""
        if not self.has_items:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._something(), timeout_s)

    def usage(self) -> dict[str, Any]:
        """Return the tokens of all choices; a prompt counts once however many choices it has."""
        prompts = [self.ended[choice].stats for choice in sorted(self.ended) if choice % self._num_choices == 0]
        prompt = sum(stats.prompt_tokens for stats in prompts)
        completion = sum(ended.stats.new_tokens for ended in self.ended.values())
        return usage_of(prompt, completion, sum(stats.cached_tokens for stats in prompts))

    def _begin(self) -> None:
        """Queue the requests."""
        self._engine.submit(self._jobs)
        self.is_begun = True

    def _forget_jobs(self) -> None:
        """Break the cycle of references with the jobs: else a large request stays until the collector finds it."""
        self._jobs = ()

    def _put(self, item: Item) -> None:
        self._items.append(item)
        self._is_silent = False
        self._wake()

    async def _something(self) -> None:
        """Wait until `items` has something to return."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_alarm(self) -> None:
        self._alarm = asyncio.get_running_loop().call_later(PING_S, self._end_silence)

    def _end_silence(self) -> None:
        if self._is_silent:
            self._is_pinging = True
            self._wake()
        self._is_silent = True
        self._set_alarm()

    def _check(self, ended: Ended) -> None:
        if ended.reason == "error":
            assert ended.error is not None
            raise as_api_error(ended.error)
        if ended.reason == "cancelled":
            raise ClientGoneError if self._client_is_gone else shutting_down()

    async def _watch(self) -> None:
        try:
            if self._before is not None:
                await self._before()
                self._begin()
        except Exception as error:
            self._failure = error
            return self._wake()
        await client_left(self._receive)
        self._client_is_gone = True
        self._engine.cancel(self._jobs)


def usage_of(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return the usage object of an answer; `cached` is the number of prompt tokens found in the prefix cache."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
