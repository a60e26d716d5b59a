"""The thread that loads the model and drives its engine for the event loop, with the queue and its limits.

Public methods of EngineThread are for the event loop unless they say otherwise; `receive` and methods that begin with
`_run` are for the thread that drives the engine. The results of one step reach the loop in one call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Literal

from cpmrt.errors import CpmrtError, DeviceError, NoDeviceError, RequestError
from cpmrt.generation import Piece
from cpmrt.server.errors import invalid, overloaded, shutting_down, unavailable
from cpmrt.sharing import jobs as sharing
from cpmrt.sharing.jobs import STOP, WORK, Ended, Generation, Inbox

if TYPE_CHECKING:
    from cpmrt import LLM

_log = logging.getLogger("cpmrt.server")
_POLL_S = 0.01
State = Literal["loading", "ready", "draining", "failed"]
Item = tuple[int, Piece | Ended]
"""The number of a choice, and a piece of it or its end."""


@dataclass(eq=False)
class Job(Generation):
    """One choice of an HTTP request on its way through the engine. `deliver` is called on the event loop."""

    deliver: Callable[[Item], None] = field(kw_only=True)
    choice: int = 0


class EngineThread:
    """Loads a model, then runs jobs on it until it is stopped.

    `max_queue` sequences may wait besides those that run. `on_tokens(count)` and `on_ended(ended)` are called on the
    event loop, for the metrics.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        *,
        max_queue: int,
        on_tokens: Callable[[int], None],
        on_ended: Callable[[Ended], None],
    ):
        self._load, self._max_queue = load, max_queue
        self._on_tokens, self._on_ended = on_tokens, on_ended
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox()
        self._open: set[Job] = set()
        self._llm: LLM | None = None
        self.state: State = "loading"
        self.failure: Exception | None = None
        """What keeps the server from going on: the model cannot be loaded, or its device is lost."""
        self.failed = asyncio.Event()
        self.loaded: asyncio.Future[None] = self._loop.create_future()
        """Done when the model is there, or with the exception that kept it from being loaded."""
        self._thread = threading.Thread(target=self._run, name="cpmrt-engine", daemon=True)
        self._thread.start()

    @property
    def llm(self) -> LLM:
        """The model. Raises ApiError 503 while it cannot take requests."""
        self.check_ready()
        assert self._llm is not None
        return self._llm

    def check_ready(self) -> None:
        """Raise ApiError 503, with the reason, unless requests are taken."""
        if self.state == "loading":
            raise unavailable("the model is still being loaded")
        if self.state == "failed":
            raise unavailable(f"the server cannot go on: {self.failure}")
        if self.state == "draining":
            raise shutting_down()

    @property
    def open_jobs(self) -> tuple[Job, ...]:
        """Jobs whose end has not been told yet, running or waiting."""
        return tuple(self._open)

    @property
    def _capacity(self) -> int:
        return self.llm.engine.limits.max_sequences + self._max_queue

    def check_capacity(self, count: int, param: str) -> None:
        """Raise ApiError 400, naming the field `param`, if so many sequences could never be taken at once.

        For any thread.
        """
        if count > self._capacity:
            raise invalid(param, f"that makes {count} answers, and this server takes {self._capacity} at a time")

    def check_room(self, count: int = 1) -> None:
        """Raise ApiError 429 if so many more jobs would not fit the queue, 503 if none is taken at all."""
        if len(self._open) + count > self._capacity:
            raise overloaded(len(self._open))

    def submit(self, jobs: tuple[Job, ...]) -> None:
        """Queue all of these jobs or none. Raises ApiError as `check_room` does, and as `SharedEngine.submit`."""
        self.check_room(len(jobs))
        self.llm.shared.submit(jobs, self)
        self._open.update(jobs)
        self._inbox.put(WORK)

    def cancel(self, jobs: tuple[Job, ...]) -> None:
        """End these jobs before the next step. No effect on those that have ended."""
        running = [job for job in jobs if job in self._open]
        if running and self._llm is not None:
            self._llm.shared.cancel(running)

    def cancel_all(self) -> None:
        """End every job before the next step."""
        self.cancel(self.open_jobs)

    def drain(self) -> None:
        """Take no more jobs; those there are go on."""
        if self.state == "ready":
            self.state = "draining"

    async def stop(self, timeout_s: float) -> bool:
        """Cancel what is left, free the model and end the thread. Return whether all this is done.

        It is not if it takes longer than `timeout_s`, or while a model is being loaded, which cannot be interrupted.
        """
        self.drain()
        self.cancel_all()
        self._inbox.put(STOP)
        until = monotonic() + timeout_s
        while self._thread.is_alive() and self.state != "loading" and monotonic() < until:
            await asyncio.sleep(_POLL_S)
        return not self._thread.is_alive()

    def receive(self, items: list[sharing.Item]) -> None:
        """Have the event loop deliver the items that a step gave."""
        self._run_post(self._deliver, items)

    def _deliver(self, items: list[sharing.Item]) -> None:
        num_tokens, errors = 0, dict[Exception, None]()
        for job, item in items:
            assert isinstance(job, Job)
            job.deliver((job.choice, item))
            if isinstance(item, Piece):
                num_tokens += len(item.token_ids)
                continue
            self._open.discard(job)
            self._on_ended(item)
            if item.error is not None:
                errors[item.error] = None
        if num_tokens:
            self._on_tokens(num_tokens)
        for error in errors:
            self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        """Log the error of a step. After a fault of the device nothing can run; others cost their own requests only."""
        if not isinstance(error, RequestError):
            _log.error("a step failed: %s", error, exc_info=None if isinstance(error, CpmrtError) else error)
        if isinstance(error, (DeviceError, NoDeviceError)):
            self._fail(error)

    def _finish_loading(self, llm: LLM | None, error: BaseException | None) -> None:
        if error is not None:
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._fail(failure)
            self.loaded.set_exception(failure)
            return
        self._llm = llm
        if self.state == "loading":
            self.state = "ready"
        self.loaded.set_result(None)

    def _fail(self, error: Exception) -> None:
        self.state, self.failure = "failed", error
        self.failed.set()

    def _run(self) -> None:
        try:
            llm = self._load()
        except BaseException as error:  # told to whoever waits for the model
            self._run_post(self._finish_loading, None, error)
            return
        self._run_post(self._finish_loading, llm, None)
        try:
            llm.shared.serve(self._inbox)
        finally:
            with suppress(CpmrtError):
                llm.close()

    def _run_post(self, call: Callable[..., None], *arguments: object) -> None:
        """Have the event loop make a call."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(call, *arguments)
