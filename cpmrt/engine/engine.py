"""The loop around the transitions: slots, the queue, steps in flight, results to their sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

from cpmrt.engine.sequence import Phase, Request, Sequence
from cpmrt.engine.transitions import (
    admit,
    apply,
    finish,
    next_decode,
    next_prefill,
    release,
    submitted,
    wants_decode,
)
from cpmrt.errors import ContextLengthError, RequestError
from cpmrt.executor import Executor, Pending, Prefill, SlotResult, Step, StepResult


@dataclass(frozen=True)
class _InFlight:
    step: Step
    sequences: tuple[Sequence, ...]
    pending: Pending


StepListener = Callable[[Step, StepResult], None]


class Engine:
    """Runs sequences on an executor. Not thread-safe: one thread drives it.

    Prompts wait in arrival order for a slot. While one is prefilled, a decode step of the running sequences follows
    each chunk, so that no stream stalls behind a long prompt. `listener` is told every step with its result.
    """

    def __init__(self, executor: Executor, listener: StepListener | None = None):
        self.executor, self.limits = executor, executor.limits
        self._listener = listener
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._free_slots = list(range(self.limits.max_sequences))[::-1]
        self._in_flight: deque[_InFlight] = deque()
        self._last_was_prefill = False

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises ContextLengthError, before any work, if prompt and new tokens exceed the context."""
        prompt, new, limit = len(request.prompt_ids), request.max_new_tokens, self.limits.max_context
        if not prompt:
            raise RequestError("the prompt is empty", expected="at least one token", actual=0)
        if prompt + new > limit:
            room = limit - prompt
            fix = f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt or raise max_context"
            raise ContextLengthError(
                "the request does not fit the context",
                expected=f"at most {limit} tokens",
                actual=f"{prompt} prompt + {new} new",
                fix=fix,
            )
        seq = Sequence(request, added_at=perf_counter())
        self._waiting.append(seq)
        return seq

    def stream(self, seq: Sequence) -> Iterator[SlotResult]:
        """Results of one sequence as they come, advancing all of them. Closing the iterator cancels the sequence."""
        try:
            while True:
                while seq.outbox:
                    yield seq.outbox.popleft()
                if seq.phase is Phase.FINISHED:
                    return
                self.advance()
        finally:
            self.finish(seq, "cancelled")

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence from outside (a stop string, a cancelled request). No effect on a finished one."""
        if seq.phase is Phase.FINISHED:
            return
        if seq.phase is Phase.WAITING:
            self._waiting.remove(seq)
            finish(seq, reason)
        else:
            finish(seq, reason)
            self._release(seq)

    def advance(self) -> None:
        """Submit what may be submitted, then wait for the oldest step in flight and hand out its results."""
        while sum(bool(flight.sequences) for flight in self._in_flight) < self.limits.run_ahead:
            if not self._submit_next():
                break
        if self._in_flight:
            self._collect_oldest()
        self._collect_control_steps()

    def free_slot(self) -> int:
        """A slot that no sequence holds, for `Executor.prompt_logits`. Raises RequestError if all are taken."""
        if not self._free_slots:
            raise RequestError("every slot is taken by a running sequence", fix="finish or close a stream first")
        return self._free_slots[-1]

    def close(self) -> None:
        """Cancel whatever runs or waits and close the executor. May be called again."""
        for seq in (*self._waiting, *self._running):
            finish(seq, "cancelled")
        self._waiting.clear()
        self._running.clear()
        self._in_flight.clear()
        self.executor.close()

    def _submit_next(self) -> bool:
        if self._waiting and self._free_slots:
            seq = self._waiting.popleft()
            self._running.append(seq)
            self._guarded(admit(seq, self._free_slots.pop()), (seq,), ())
        prefilling = [seq for seq in self._running if seq.phase is Phase.PREFILL]
        decoding = [seq for seq in self._running if wants_decode(seq)]
        if prefilling and not (decoding and self._last_was_prefill):
            self._submit(next_prefill(prefilling[0], self.limits), (prefilling[0],))
        elif decoding:
            self._submit(next_decode(decoding, self.limits), tuple(decoding))
        else:
            return False
        return True

    def _submit(self, step: Step, sequences: tuple[Sequence, ...]) -> None:
        self._guarded(step, sequences, sequences)
        for seq in sequences:
            submitted(seq, step)
        self._last_was_prefill = isinstance(step, Prefill)

    def _guarded(self, step: Step, affected: tuple[Sequence, ...], receivers: tuple[Sequence, ...]) -> None:
        """Submit; cancel the affected sequences if that fails. Half a step may have advanced some of them."""
        try:
            pending = self.executor.submit(step)
        except BaseException:
            for seq in affected:
                self.finish(seq, "cancelled")
            raise
        self._in_flight.append(_InFlight(step, receivers, pending))

    def _collect_oldest(self) -> None:
        flight = self._in_flight[0]
        result = flight.pending.wait()
        self._in_flight.popleft()
        now = perf_counter()
        if self._listener is not None:
            self._listener(flight.step, result)
        for seq, slot_result in zip(flight.sequences, result.slots, strict=True):
            was_finished = seq.phase is Phase.FINISHED
            gained = apply(seq, flight.step, slot_result)
            if gained.token_ids:
                seq.first_token_at = seq.first_token_at or now
                seq.last_token_at = now
                seq.outbox.append(gained)
            if seq.phase is Phase.FINISHED and not was_finished:
                self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """Steps of the sequence still in flight come before the release, so the slot may be reused at once."""
        self._running.remove(seq)
        self._guarded(release(seq), (), ())
        self._free_slots.append(seq.slot)
        self._collect_control_steps()

    def _collect_control_steps(self) -> None:
        """Steps without results (Admit, Release) are only reported, each in its place among the others."""
        while self._in_flight and not self._in_flight[0].sequences:
            self._collect_oldest()
