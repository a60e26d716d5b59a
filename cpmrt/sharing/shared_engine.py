"""Many threads, one engine: of the threads that wait for results one drives the engine for all of them.

So a lone caller drives it by itself, without a hand-over between threads. The others sleep at their inboxes until
something comes for them, or until the thread that drives has what it waited for and leaves the lead to one of them.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock, get_ident

from cpmrt.engine import Engine
from cpmrt.engine import Sequence as EngineSequence
from cpmrt.engine.loan import Loan
from cpmrt.errors import ClosedError, CpmrtError, RequestError
from cpmrt.generation import AnswerText, Piece
from cpmrt.sharing.interrupts import HeldInterrupt
from cpmrt.sharing.jobs import (
    LEAD,
    STOP,
    Closed,
    Ended,
    EndsInbox,
    Generation,
    Inbox,
    Item,
    Job,
    Message,
    NoSlotError,
    Reading,
    Receiver,
)
from cpmrt.sharing.remade_answers import RemadeAnswers
from cpmrt.text import Tokenizer

_log = logging.getLogger("cpmrt")


class SharedEngine:
    """Runs the jobs of any number of threads on one engine. Methods for the driving thread alone begin with `_run`.

    `cancel` may be called by the garbage collector, in any thread and between any two instructions, also of this file.
    Therefore nothing here waits for a lock, and every change to the engine is a command in a queue, which the thread
    that drives carries out between two steps.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None):
        self.engine, self._tokenizer = engine, tokenizer
        self._lead = Lock()
        """Held by the thread that drives."""
        self._leader = 0
        self._commands: deque[Callable[[], None]] = deque()
        self._sleeping: dict[Inbox, None] = {}
        """Inboxes of threads that wait while another one drives."""
        self._generations: dict[EngineSequence, Generation] = {}
        self._readings: dict[Loan, Reading] = {}
        self._news: list[EngineSequence] = []
        """Sequences with tokens or an end that their receivers have not got yet."""
        engine.on_news = self._news.append
        self._remade = RemadeAnswers(engine)
        self._remaking: Generation | None = None
        """The job of `serve` itself that computes an answer again."""
        self._is_closed = False
        self._process = os.getpid()

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do for anybody."""
        return not (self._commands or self._generations or self._readings)

    @property
    def is_driven_here(self) -> bool:
        """True in a listener, or a signal handler, that the engine's own step has called."""
        return self._leader == get_ident()

    def submit(self, jobs: Sequence[Job], receiver: Receiver) -> None:
        """Queue these jobs, in their order; their items go to `receiver`.

        Raises ContextLengthError or RequestError, with nothing queued, if the engine does not take one of them, and
        ClosedError after `close` and in a forked process.
        """
        self._prepare(jobs, receiver)
        self._commands.append(partial(self._run_add, jobs))

    def check_usable(self) -> None:
        """Raise ClosedError after `close` and in a forked process."""
        self._check_process()
        if self._is_closed:
            raise _closed()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End these jobs, now or before the next step. No effect on those that have ended."""
        if os.getpid() == self._process:
            with HeldInterrupt():
                self._commands.append(partial(self._run_cancel, jobs))
                self._carry_out()

    def next(self, inbox: Inbox) -> Item:
        """Return the next item that comes to the inbox. The calling thread drives the engine or sleeps meanwhile.

        Raises whatever the caller's listener raises, KeyboardInterrupt between two steps, and ClosedError in a forked
        process.
        """
        self._check_process()
        while True:
            message = self._message(inbox)
            if isinstance(message, tuple):
                return message

    def run(self, jobs: Sequence[Job], note: Callable[[Job], None] = lambda job: None) -> None:
        """Run jobs to their ends and call `note` with each as it ends; pieces of generations are kept in them.

        Raises as `submit` and `next` do, and the first error of a job; then all are cancelled.
        """
        inbox = EndsInbox()
        self.submit(jobs, inbox)
        try:
            for _ in jobs:
                job, end = self.next(inbox)
                if isinstance(end, Ended) and end.error is not None:
                    raise end.error
                note(job)
        except BaseException:
            self.cancel(jobs)
            raise

    def remake_answers(self) -> None:
        """Compute the last answers once more, as prompts that begin with them would be. Raises as `run` does."""
        while (job := self._remade.next()) is not None:
            self.run([job])

    def serve(self, inbox: Inbox) -> None:
        """Drive the engine whenever there is a job, until STOP comes to the inbox; any other message wakes it.

        Between jobs it computes answers again; a job that comes meanwhile ends that.
        """
        message: Message | None = None
        while message is not STOP:
            try:
                if not inbox.is_empty() or (self.is_idle and not self._remake_one()):
                    message = inbox.get()
                elif not self._drive(lambda: self.is_idle or not inbox.is_empty()):
                    message = self._sleep(inbox)
            except BaseException as error:  # a listener's SystemExit too: without this thread everybody waits for ever
                _log.error("a step failed: %s", error, exc_info=None if isinstance(error, CpmrtError) else error)

    def close(self) -> None:
        """End every job with ClosedError, and close the engine. May be called again, and by any thread.

        It returns when all is done. If the calling thread drives the engine itself (in a signal handler or a listener),
        it returns at once, and the engine is closed before the next step.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        inbox, closed = Inbox(), Closed()
        self._commands.append(partial(self._run_close, inbox, closed))
        if self.is_driven_here:
            return
        while self._message(inbox) is not closed:
            pass
        if closed.error is not None:
            raise closed.error

    def _prepare(self, jobs: Sequence[Job], receiver: Receiver) -> None:
        """Give jobs their receiver, and generations their sequence and text. Raises as `submit` does."""
        self.check_usable()
        for job in jobs:
            job.receiver = receiver
            if isinstance(job, Generation):
                job.sequence = self.engine.sequence(job.request)
                job.text = AnswerText(self._tokenizer, job.request, job.shown_ids)

    def _remake_one(self) -> bool:
        """Submit a job that computes an answer again, and tell whether there was one."""
        job = None if self._is_closed else self._remade.next()
        if job is not None:
            self._prepare([job], EndsInbox())
            self._commands.append(partial(self._run_remake, job))
        return job is not None

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError(
                "the model belongs to the process that this one was forked from",
                fix="make an LLM in this process, or start it with multiprocessing's method 'spawn'",
            )

    def _message(self, inbox: Inbox) -> Message:
        """Return the next message at the inbox; the calling thread drives the engine or sleeps until one comes."""
        if not inbox.is_empty() or self._drive(lambda: not inbox.is_empty()):
            return inbox.get()
        return self._sleep(inbox)

    def _drive(self, is_done: Callable[[], bool]) -> bool:
        """Drive the engine until `is_done()`; return False at once if another thread drives it."""
        with HeldInterrupt() as interrupt:
            if not self._takes_lead():
                return False
            try:
                while not (is_done() or interrupt.requested):
                    self._run_step()
            finally:
                self._leave_lead()
                self._carry_out()
        return True

    def _takes_lead(self) -> bool:
        if not self._lead.acquire(blocking=False):
            return False
        self._leader = get_ident()
        return True

    def _leave_lead(self) -> None:
        self._leader = 0
        self._lead.release()

    def _sleep(self, inbox: Inbox) -> Message:
        """Wait for a message while another thread drives."""
        if self.is_driven_here:
            raise RequestError("a listener or a signal handler asks the engine that it interrupts", fix="ask it later")
        self._sleeping[inbox] = None
        message: Message | None = None
        try:
            # A thread that stops driving looks for sleepers after it has left the lead: one of the two sees the other.
            message = inbox.get() if self._lead.locked() else LEAD
        finally:
            self._sleeping.pop(inbox, None)
            if message is not LEAD:
                self._wake_one()
        return message

    def _carry_out(self) -> None:
        """Carry out the queued commands, unless another thread drives and does so; then wake a thread to drive."""
        try:
            while self._commands and self._takes_lead():
                try:
                    self._run_commands()
                finally:
                    self._leave_lead()
        finally:  # whatever a listener raises
            self._wake_one()

    def _wake_one(self) -> None:
        """Leave the lead to a thread that sleeps, if there is one, unless some thread has it."""
        if self._sleeping and not self._lead.locked():
            with suppress(KeyError):  # the last one has woken up
                self._sleeping.popitem()[0].put(LEAD)

    def _run_step(self) -> None:
        """Carry out the commands, advance every reading by a chunk and the sequences by a step, hand out the results.

        Raises errors that are no sequence's own, such as a listener's.
        """
        self._run_commands()
        for loan in self.engine.slots.loans:
            if loan in self._readings:  # other loans are of tools that drive the engine themselves
                self._run_reading(loan, self._readings[loan])
        try:
            self.engine.advance()
        except Exception as error:
            if not any(seq.failure is error for seq in self._news):
                raise
        finally:
            self._run_hand_out()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _run_remake(self, job: Generation) -> None:
        if self._generations or self._readings:  # jobs that have come meanwhile
            self._remade.put_back(job)
        else:
            self._run_add([job])
            self._remaking = job

    def _run_add(self, jobs: Sequence[Job]) -> None:
        remaking, self._remaking = self._remaking, None
        if remaking is not None and remaking.sequence in self._generations:
            self._run_cancel([remaking])
            self._remade.put_back(remaking)
        for job in jobs:
            if self._is_closed:
                self._run_end(job, _closed())
            elif isinstance(job, Generation):
                self._generations[job.sequence] = job
                self.engine.queue(job.sequence)
            elif job.is_cancelled:
                self._run_end(job)
            elif not (job.waits or self.engine.has_free_slot):
                self._run_end(job, NoSlotError("every slot is taken"))
            else:
                job.loan = self.engine.borrow(job.num_tokens, job.prompt_ids)
                self._readings[job.loan] = job

    def _run_cancel(self, jobs: Sequence[Job]) -> None:
        interrupts = list[BaseException]()
        for job in jobs:
            if isinstance(job, Reading):
                job.is_cancelled = True
                if job.loan in self._readings:
                    self._run_end(job)
            elif job.sequence in self._generations:
                self._run_finish(job.sequence, interrupts)
                self._run_end(job)
        if interrupts:
            raise interrupts[0]

    def _run_finish(self, seq: EngineSequence, interrupts: list[BaseException]) -> None:
        """Cancel a sequence; what a listener raises to end the program is added to `interrupts`, to be raised later."""
        try:
            with suppress(Exception):  # of a lost device or a listener: the caller of the next step hears of it
                self.engine.finish(seq, "cancelled")
        except BaseException as error:
            interrupts.append(error)

    def _run_close(self, inbox: Inbox, closed: Closed) -> None:
        self._is_closed = True
        try:
            self.engine.close()
        except Exception as error:
            closed.error = error
        jobs: list[Job] = [*self._generations.values(), *self._readings.values()]
        for job in jobs:
            self._run_end(job, _closed())
        inbox.put(closed)

    def _run_reading(self, loan: Loan, reading: Reading) -> None:
        try:
            if reading.running is None:
                reading.running = reading.work(loan.slot, loan.block_table)
            next(reading.running)
        except StopIteration as end:
            reading.result = end.value
            self._run_end(reading)
        except Exception as error:
            self._run_end(reading, error)

    def _run_hand_out(self) -> None:
        """Give each receiver, in one call, the new items of its jobs; then raise the first error that ends no job."""
        batches: dict[Receiver, list[Item]] = {}
        news, errors = dict.fromkeys(self._news), list[BaseException]()
        self._news.clear()
        for seq in news:
            job = self._generations.get(seq)
            if job is None:
                continue
            try:
                items = self._run_collect(job, errors)
            except Exception as error:
                self._run_finish(seq, errors)
                items = [(job, job.ended(error))]
            if items:
                batches.setdefault(job.receiver, []).extend(items)
                if isinstance(items[-1][1], Ended):
                    del self._generations[seq]
        for receiver, batch in batches.items():
            receiver.receive(batch)
        if errors:
            raise errors[0]

    def _run_collect(self, job: Generation, errors: list[BaseException]) -> list[Item]:
        """Return a generation's new pieces, and its end if it has come; `errors` gets what its release raises."""
        seq, text, items = job.sequence, job.text, list[Item]()
        while seq.outbox:
            items.append((job, text.push(seq.outbox.popleft())))
            if text.is_over:
                try:
                    self.engine.stop(seq, text.num_tokens)
                except BaseException as error:
                    errors.append(error)
        if seq.finish_reason is not None:
            rest = text.rest()
            items += [(job, Piece(rest))] * bool(rest)
            items.append((job, job.ended()))
            self._remade.note(seq)
        return items

    def _run_end(self, job: Job, error: Exception | None = None) -> None:
        """Remove a job from the active ones, and send its end to its receiver."""
        if isinstance(job, Generation):
            self._generations.pop(job.sequence, None)
        elif job.loan is not None:
            del self._readings[job.loan]
            if job.running is not None:
                with suppress(Exception):  # that it ends is all that counts now
                    job.running.close()
            self.engine.give_back(job.loan)
        job.receiver.receive([(job, job.ended(error))])


def _closed() -> ClosedError:
    return ClosedError("the model is closed", fix="make a new LLM")
