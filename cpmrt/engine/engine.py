"""The engine: it queues requests, gives them slots, submits their steps and hands each sequence its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from time import perf_counter

from cpmrt.config.engine import KEEP_ANSWERS
from cpmrt.engine import transitions
from cpmrt.engine.checks import check_request, guide_of, late_form_of
from cpmrt.engine.decode_steps import DecodeSteps
from cpmrt.engine.flight import StepsInFlight
from cpmrt.engine.loan import Loan
from cpmrt.engine.prefix_cache import PrefixCache
from cpmrt.engine.sequence import Phase, Request, Sequence
from cpmrt.engine.slots import Slots
from cpmrt.errors import RequestError
from cpmrt.executor import Admit, Executor, Keep, Prefill, Release, SlotResult, Step, StepResult

StepListener = Callable[[Step, StepResult], None]


class Engine:
    """Runs sequences on an executor. Not thread-safe: one thread at a time drives it (`cpmrt.sharing`).

    Prompts and loans wait in arrival order for a slot. While one is prefilled, a decode step of the running sequences
    follows each chunk, so that no stream stalls behind a long prompt. `listener` is called with every step and its
    result. With `prefix_cache` False every prompt is computed whole; with KEEP_ANSWERS the keys and values that decode
    steps have written are reused too, though a prefill would give other bits.

    Where the executor drafts, sequences take Speculate steps, alone or as many together as it drafts for. With
    `adaptive`, and if the executor knows what its steps cost, `speculation.DraftPolicy` chooses their shape, or plain
    steps; otherwise all have the first shape that takes so many. The tokens are the same in every case.

    The steps of a sequence under a grammar have masks, and bring tokens that are certain (`engine.guide`). Such a
    sequence cannot run ahead by more than a step; sequences that decode with it wait for it, and all go on together.
    Its draft steps wait until all steps before are done, except where one draft step follows another.
    """

    def __init__(
        self,
        executor: Executor,
        listener: StepListener | None = None,
        *,
        prefix_cache: bool | str = True,
        adaptive: bool = True,
    ):
        self.executor, self.limits = executor, executor.limits
        self.listener = listener
        self.on_news: Callable[[Sequence], object] = lambda seq: None
        """Called with each sequence that may have got tokens or come to its end."""
        self._uses_cache, self._keeps_answers = bool(prefix_cache), prefix_cache == KEEP_ANSWERS
        # A state within an answer cannot be kept where steps draft: how many tokens a draft step gives is not known
        # before it is done, and by then the state may be further on.
        has_states = self.limits.num_snapshots > 0 and not self.limits.tree_shapes
        self._keeps_answer_states = self._keeps_answers and has_states
        self.adaptive = adaptive
        self.slots = Slots(self.limits, uses_cache=self._uses_cache)
        self._waiting: deque[Sequence | Loan] = deque()
        self.running: list[Sequence] = []
        """The sequences that hold a slot."""
        self._in_flight = StepsInFlight(executor)
        self._decode_steps = DecodeSteps(self.limits, adaptive=adaptive)
        self._last_was_prefill = False

    @property
    def cache(self) -> PrefixCache | None:
        """The prefix cache, which gives out the KV pages; None where the executor's block tables are fixed."""
        return self.slots.cache

    @property
    def remakes_answers(self) -> bool:
        """True if an answer is to be computed again as a prompt would be, so that the prompt after it finds it."""
        return self.limits.remakes_answers and self.cache is not None and self._uses_cache and not self._keeps_answers

    @property
    def is_idle(self) -> bool:
        """True if no sequence waits or runs and no step is in flight."""
        return not (self._waiting or self.running or self._in_flight)

    @property
    def has_free_slot(self) -> bool:
        """True if a sequence, or a loan, that is queued now need not wait until another one ends."""
        return len(self.slots.free) > len(self._waiting)

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises as `sequence` does, before any work."""
        seq = self.sequence(request)
        self.queue(seq)
        return seq

    def sequence(self, request: Request) -> Sequence:
        """Return a new sequence, which is not queued yet; any thread may call this. Raises as `check_request` does."""
        check_request(request, self.limits)
        guide, late_form = guide_of(request, self.limits), late_form_of(request, self.limits)
        return Sequence(request, guide, late_form, added_at=perf_counter())

    def queue(self, seq: Sequence) -> None:
        """Have a new sequence wait for a slot."""
        self._waiting.append(seq)

    def stream(self, seq: Sequence) -> Iterator[SlotResult]:
        """Yield the results of one sequence as they come. Closing the iterator cancels the sequence.

        Waiting for them advances every sequence. An error of a step is raised in the stream of each sequence in that
        step, whichever stream was advancing then.
        """
        try:
            while True:
                while seq.outbox:
                    yield seq.outbox.popleft()
                if seq.phase is Phase.FINISHED:
                    if seq.failure is not None:
                        raise seq.failure
                    return
                self.advance()
        finally:
            self.finish(seq, "cancelled")

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence from outside, as when its request is cancelled. No effect on a finished one."""
        self._end(seq, reason)
        self._collect_control_steps()

    def stop(self, seq: Sequence, num_tokens: int) -> None:
        """End a sequence at a stop string in its text, which its first `num_tokens` tokens complete.

        Tokens after them do not count, nor does an end or an error that came with those.
        """
        transitions.cut(seq, num_tokens)
        try:
            self.finish(seq, "stop")
        finally:  # whatever a listener raises
            seq.finish_reason, seq.failure = "stop", None
            seq.outbox.clear()

    def advance(self) -> None:
        """Submit what may be submitted, then wait for the oldest step in flight and hand out its results.

        If nothing is in flight after that, and the executor can run ahead, the next step is submitted before anybody
        reads the results.
        """
        self._submit_up_to(self.limits.run_ahead)
        try:
            if self._in_flight:
                self._collect_oldest()
            if self.limits.run_ahead > 1:
                self._submit_up_to(1)
        finally:
            self._in_flight.give_masks()
        self._collect_control_steps()

    def borrow(self, num_tokens: int, prompt_ids: tuple[int, ...] = ()) -> Loan:
        """Ask for a slot with pages for so many tokens (see `Loan`); `advance` lends it when its turn comes."""
        loan = Loan(num_tokens, prompt_ids)
        self._waiting.append(loan)
        return loan

    def give_back(self, loan: Loan) -> None:
        """End a loan, lent or still waiting. No effect on one that has ended."""
        if not self.slots.end(loan) and loan in self._waiting:
            self._waiting.remove(loan)

    def close(self) -> None:
        """Cancel whatever runs or waits and close the executor. May be called again."""
        for seq in (*self._waiting, *self.running):
            if isinstance(seq, Sequence):
                transitions.finish(seq, "cancelled")
        self._waiting.clear()
        self.running.clear()
        self._in_flight.clear()
        self.slots.clear()  # a request from now on shall reach the executor, which refuses it, and not wait for a slot
        self.executor.close()

    def _submit_up_to(self, num_steps: int) -> None:
        """Submit what may be submitted, until `num_steps` steps with results are in flight."""
        while self._in_flight.num_awaited < num_steps and self._submit_next():
            pass

    def _submit_next(self) -> bool:
        is_awaited = self._waiting or any([seq.phase is Phase.PAUSED for seq in self.running])
        if is_awaited and not transitions.have_empty_mask(self.running) and (self._resume_one() or self._take_one()):
            return True
        decoding = tuple([seq for seq in self.running if transitions.wants_decode(seq)])
        if not (decoding and self._last_was_prefill):
            for seq in self.running:
                if seq.phase is Phase.PREFILL:
                    self._submit_prefill(seq)
                    return True
        if not decoding:
            return False
        is_lending = self.slots.is_lending
        may_draft = transitions.may_draft(decoding, self.limits, is_lending)
        guided = [seq for seq in decoding if seq.guide]
        if guided and self._awaits_mask(guided, may_draft=may_draft, is_lending=is_lending):
            return False
        self._submit(self._decode_steps.next(decoding, may_draft=may_draft), decoding)
        if guided:
            self._fill_masks(guided)
        if self._keeps_answer_states:
            self._keep_answers(decoding)
        return True

    def _awaits_mask(self, guided: list[Sequence], *, may_draft: bool, is_lending: bool) -> bool:
        """Tell whether any of `guided`, which are decoding sequences with a grammar, cannot take a further step yet."""
        is_alone = len(self.running) == len(self._in_flight) == 1 and not (self._waiting and self.slots.free)
        awaits = partial(transitions.awaits_mask, may_draft=may_draft, is_lending=is_lending, is_alone=is_alone)
        return any(awaits(seq, num_awaited=self._in_flight.num_awaited) for seq in guided)

    def _keep_answers(self, decoding: tuple[Sequence, ...]) -> None:
        """Keep the state of each sequence that the steps so far bring to a border of pages, if there is a snapshot."""
        for seq in decoding:
            if self.cache and seq.pages and seq.num_expected % self.limits.page_size == 0:
                snapshot = self.cache.snapshot_within_answer(seq.pages, seq.num_expected)
                if snapshot is not None:
                    self._guarded(Keep(seq.slot, snapshot), (seq,), ())

    def _resume_one(self) -> bool:
        """Resume the first paused sequence that has no steps in flight, and tell whether there was one."""
        for seq in self.running:
            if seq.phase is Phase.PAUSED and not seq.num_in_flight:
                try:
                    self._resume(seq)
                finally:
                    self.on_news(seq)
                return True
        return False

    def _take_one(self) -> bool:
        """Give a free slot to the first sequence or loan that waits.

        Returns True if there is nothing to prefill after that: a loan has its slot, or an admission failed.
        """
        if not (self._waiting and self.slots.free):
            return False
        first = self._waiting.popleft()
        if isinstance(first, Loan):
            self.slots.lend(first)
            return True
        self.running.append(first)
        try:
            self._admit(first)
        except RequestError:
            return True  # the sequence's own stream raises it: another one may be advancing
        return False

    def _admit(self, seq: Sequence) -> None:
        seq.started_at = seq.started_at or perf_counter()
        slot, pages = self.slots.take(seq.text, transitions.num_reserved(seq.request, self.limits))
        self._begin(seq, transitions.admit(seq, slot, pages))

    def _begin(self, seq: Sequence, admit: Admit) -> None:
        """Submit the steps before a sequence's prefill."""
        self._decode_steps.begin(seq)
        self._guarded(admit, (seq,), ())
        for step in transitions.recalls(seq, self.limits):
            self._guarded(step, (seq,), ())

    def _submit_prefill(self, seq: Sequence) -> None:
        self._submit(transitions.next_prefill(seq, self.limits), (seq,))
        keep = transitions.keep_state(seq)
        if keep is not None:
            self._guarded(keep, (seq,), ())

    def _submit(self, step: Step, sequences: tuple[Sequence, ...]) -> None:
        self._guarded(step, sequences, sequences)
        for seq in sequences:
            transitions.submitted(seq, step)
        self._last_was_prefill = isinstance(step, Prefill)

    def _guarded(self, step: Step, affected: tuple[Sequence, ...], receivers: tuple[Sequence, ...]) -> None:
        """Submit a step. If that fails, cancel the affected sequences: half a step may have advanced some of them."""
        try:
            self._in_flight.submit(step, receivers)
        except BaseException as error:
            self._fail_all(affected, error)
            raise

    def _collect_oldest(self) -> None:
        step, sequences, _ = self._in_flight.oldest
        try:
            result = self._in_flight.collect()
        except Exception as error:
            self._fail_all(sequences, error)
            raise
        try:
            if self.listener is not None:
                self.listener(step, result)
        finally:  # whatever a listener raises costs nobody a token
            self._hand_out(step, sequences, result)

    def _hand_out(self, step: Step, sequences: tuple[Sequence, ...], result: StepResult) -> None:
        now, ended = perf_counter(), list[Sequence]()
        for seq, slot_result in zip(sequences, result.slots, strict=True):
            was_running = seq.finish_reason is None
            gained = transitions.apply(seq, step, slot_result)
            if isinstance(step, Prefill) and self.cache and seq.pages:
                self.cache.keep(seq.pages, seq.text, min(seq.num_computed, len(seq.request.prompt_ids)))
            transitions.give(seq, gained, now, result.num_rescored)
            if was_running and seq.finish_reason is not None:
                ended.append(seq)
            self.on_news(seq)
        try:
            if ended:
                self._release_all(ended)
        finally:
            self._decode_steps.applied(step, sequences, result)
            self._fill_masks(sequences)

    def _fill_masks(self, sequences: Iterable[Sequence]) -> None:
        """Fill the masks of the sequences' last steps, and release the sequences whose grammar fails there."""
        failed = transitions.fill_masks(sequences)
        if failed:
            for seq in failed:
                self.on_news(seq)
            self._release_all(failed)

    def _end(self, seq: Sequence, reason: str) -> None:
        if seq.phase is Phase.FINISHED:
            return
        try:
            if seq.phase is Phase.WAITING:
                self._waiting.remove(seq)
                transitions.finish(seq, reason)
            else:
                transitions.finish(seq, reason)
                self._release(seq)
        finally:  # a lost device releases nothing, and whoever waits must hear of it
            self.on_news(seq)

    def _fail(self, seq: Sequence, error: BaseException) -> None:
        """End a sequence whose step failed. An interrupt is not kept as the reason: one stream alone raises it."""
        if seq.phase is not Phase.FINISHED and isinstance(error, Exception):
            seq.failure = error
        self._end(seq, "cancelled")

    def _fail_all(self, sequences: tuple[Sequence, ...], error: BaseException) -> None:
        """End every sequence of a step that failed, though a device that is lost releases none of them."""
        for seq in sequences:
            with suppress(Exception):
                self._fail(seq, error)

    def _resume(self, seq: Sequence) -> None:
        """Resume a paused sequence: its slot takes it anew, and prefills the tokens behind its last full page.

        A recurrent state may be ahead of the text and cannot be cut back. A sequence with one gives its slot back and
        waits, before all others, to be prefilled from the last snapshot that its text can be resumed from.
        """
        gained = transitions.close_thought(seq)
        if gained.token_ids:
            seq.outbox.append(gained)
        if seq.phase is Phase.FINISHED:
            self._release(seq)
        elif self.limits.num_snapshots:
            try:
                self._release(seq)
            finally:
                transitions.wait_again(seq)
                self._waiting.appendleft(seq)
                self._decode_steps.forget()
        else:
            self._guarded(Release(seq.slot), (seq,), ())
            self._begin(seq, transitions.readmit(seq, self.limits))

    def _release_all(self, sequences: list[Sequence]) -> None:
        """Submit the release of every sequence's slot; an error of one is raised after all have been submitted."""
        with ExitStack() as releases:
            for seq in reversed(sequences):
                releases.callback(self._release, seq)

    def _release(self, seq: Sequence) -> None:
        """Submit the release of a sequence's slot. Steps still in flight run before that: slot and pages may be reused.

        Slot and pages are free even if the release fails: if the executor is lost, it says so to the next sequence.
        """
        self.running.remove(seq)
        try:
            self._guarded(Release(seq.slot), (), ())
        finally:
            self.slots.put_back(seq.slot)
            if self.cache:
                transitions.release_pages(seq, self.cache, keeps_answer=self._keeps_answers)

    def _collect_control_steps(self) -> None:
        """Report the oldest steps to the listener while they have no results (Admit, Keep, Recall, Release)."""
        while self._in_flight and not self._in_flight.oldest.sequences:
            self._collect_oldest()
