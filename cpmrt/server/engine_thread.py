"""The thread that owns the model: it alone drives the engine. The event loop gives it jobs and gets pieces back.

Every public method of EngineThread is for the event loop; what the thread itself runs begins with `_run`. Commands
reach the thread through a queue that it reads between two steps; the results of one step reach the loop in one call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from cpmrt.engine import GenerationStats, Request, Sequence
from cpmrt.errors import CpmrtError, DeviceError, NoDeviceError
from cpmrt.generation import AnswerText, Piece
from cpmrt.server.errors import invalid, overloaded, unavailable

if TYPE_CHECKING:
    from cpmrt import LLM

_log = logging.getLogger("cpmrt.server")
State = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class Ended:
    """The end of a choice. `reason` is "stop", "length", "cancelled" or, with an `error`, "error".

    Seconds are from the request's arrival: in the queue, and to the first token (0 without one).
    """

    reason: str
    stats: GenerationStats
    queued_s: float = 0.0
    first_token_s: float = 0.0
    error: Exception | None = None
    stop_string: str | None = None
    """The stop string that ended the text."""


Item = tuple[int, Piece | Ended]
"""The number of a choice, and a piece of it or its end."""


@dataclass(eq=False)
class Job:
    """One choice of an HTTP request on its way through the engine. `deliver` is called on the event loop.

    `shown_ids` are special tokens that its text keeps.
    """

    request: Request
    deliver: Callable[[Item], None]
    choice: int = 0
    shown_ids: frozenset[int] = frozenset()
    submitted_at: float = field(default_factory=perf_counter)
    sequence: Sequence | None = None
    text: AnswerText | None = None
    started_at: float = 0.0

    def ended(self, reason: str, error: Exception | None = None) -> Ended:
        """Return the end of this job, now."""
        seq = self.sequence
        queued_s = (self.started_at or perf_counter()) - self.submitted_at
        first_token_s = seq.first_token_at - self.submitted_at if seq is not None and seq.token_ids else 0.0
        stop_string = self.text.stop_string if self.text else None
        return Ended(reason, seq.stats if seq else GenerationStats(), queued_s, first_token_s, error, stop_string)


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
        self._commands: SimpleQueue[Callable[[LLM], None] | None] = SimpleQueue()
        """Calls for the thread to make; None ends it."""
        self._open: set[Job] = set()
        self._active: list[Job] = []
        self._llm: LLM | None = None
        self.state: State = "loading"
        self._failure: Exception | None = None
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
            raise unavailable(f"the server cannot go on: {self._failure}")
        if self.state == "draining":
            raise unavailable("the server is shutting down")

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
        """Queue all of these jobs or none. Raises ApiError as `check_room` does."""
        self.check_room(len(jobs))
        self._open.update(jobs)
        self._commands.put(lambda llm: self._run_jobs(llm, jobs))

    def cancel(self, jobs: tuple[Job, ...]) -> None:
        """End these jobs before the next step. No effect on those that have ended."""
        running = [job for job in jobs if job in self._open]
        if running:
            self._commands.put(lambda llm: self._run_cancel(llm, running))

    def drain(self) -> None:
        """Take no more jobs; those there are go on."""
        if self.state == "ready":
            self.state = "draining"

    async def stop(self) -> None:
        """Cancel what is left, free the model and end the thread."""
        self.drain()
        self._commands.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    def _deliver(self, batch: list[tuple[Job, Piece | Ended]]) -> None:
        num_tokens = 0
        for job, item in batch:
            job.deliver((job.choice, item))
            if isinstance(item, Piece):
                num_tokens += len(item.token_ids)
            else:
                self._open.discard(job)
                self._on_ended(item)
        if num_tokens:
            self._on_tokens(num_tokens)

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
        self.state, self._failure = "failed", error

    def _run(self) -> None:
        try:
            llm = self._load()
        except BaseException as error:  # told to whoever waits for the model
            self._run_post(self._finish_loading, None, error)
            return
        self._run_post(self._finish_loading, llm, None)
        try:
            while self._run_commands(llm):
                if self._active:
                    self._run_step(llm)
        finally:
            self._run_end(self._active, "cancelled")
            with suppress(CpmrtError):
                llm.close()

    def _run_post(self, call: Callable[..., None], *arguments: object) -> None:
        """Have the event loop make a call."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run_commands(self, llm: LLM) -> bool:
        """Carry out the commands that have come, and wait for one while no job is active; False to end."""
        while True:
            try:
                command = self._commands.get(block=not self._active)
            except Empty:
                return True
            if command is None:
                return False
            command(llm)

    def _run_jobs(self, llm: LLM, jobs: tuple[Job, ...]) -> None:
        for job in jobs:
            try:
                if self._failure is not None:
                    raise self._failure
                job.sequence = llm.engine.add(job.request)
                job.text = AnswerText(llm.engine, llm.tokenizer, job.sequence, job.shown_ids)
                self._active.append(job)
            except Exception as error:
                self._run_end([job], "error", error)

    def _run_cancel(self, llm: LLM, jobs: list[Job]) -> None:
        jobs = [job for job in jobs if job in self._active]
        for job in jobs:
            assert job.sequence is not None
            try:
                llm.engine.finish(job.sequence, "cancelled")
            except Exception as error:
                self._run_failed(error)
        self._run_end(jobs, "cancelled")

    def _run_step(self, llm: LLM) -> None:
        try:
            llm.engine.advance()
        except Exception as error:  # each sequence knows whether it was its own step
            self._run_failed(error)
        batch: list[tuple[Job, Piece | Ended]] = []
        for job in [job for job in self._active if self._run_collect(job, batch)]:
            self._active.remove(job)
        if batch:
            self._run_post(self._deliver, batch)
        if self._failure is not None:
            self._run_end(self._active, "error", self._failure)

    def _run_collect(self, job: Job, batch: list[tuple[Job, Piece | Ended]]) -> bool:
        """Put the new pieces of a sequence into the batch, and tell whether it has ended."""
        seq, text = job.sequence, job.text
        assert seq is not None and text is not None
        if seq.slot >= 0 and not job.started_at:
            job.started_at = perf_counter()
        while seq.outbox:
            batch.append((job, text.piece(seq.outbox.popleft())))
        if seq.finish_reason is None:
            return False
        batch += [(job, piece) for piece in text.rest()]
        batch.append((job, job.ended("error" if seq.failure else seq.finish_reason, seq.failure)))
        return True

    def _run_end(self, jobs: list[Job], reason: str, error: Exception | None = None) -> None:
        """Take these jobs off the active ones and tell their end."""
        ended = [(job, job.ended(reason, error)) for job in jobs]
        self._active = [job for job in self._active if job not in jobs]
        self._run_post(self._deliver, ended)

    def _run_failed(self, error: Exception) -> None:
        """Log a failed step. After a fault of the device nothing can run; others cost their own requests only."""
        _log.error("a step failed: %s", error, exc_info=None if isinstance(error, CpmrtError) else error)
        if isinstance(error, (DeviceError, NoDeviceError)):
            self._failure = error
            self._run_post(self._fail, error)
