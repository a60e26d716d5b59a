"""The two rings in mapped host memory: commands to the device, answers from it. Nothing else crosses in a step.

The host writes a command into an entry and launches; the kernels count entries by themselves. Every command is answered
by one word a row in the entry of the result ring with the same index: low half of the command's number (from 1 on)
shifted left by 32, and a token id, NO_TOKEN or a code that says why there is none. A word with the right number is
complete, and so are its log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from os import sched_yield
from time import sleep
from typing import TYPE_CHECKING

import numpy as np

from cpmrt.cuda.driver.host_memory import host_buffers
from cpmrt.cuda.step.commands import command_bytes, write_certain, write_slots, write_step
from cpmrt.cuda.step.structs import (
    CUT_NODE,
    DECODE_CERTAIN,
    NO_MASK,
    NO_TOKEN,
    NON_FINITE,
    NOTHING_ALLOWED,
    RESULT_RECORD,
    RING_ENTRIES,
)
from cpmrt.errors import DeviceError
from cpmrt.executor import Admit, MaskFailure, Pending, Prefill, Recall, SlotResult, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from cupy.cuda import Stream

_MASK_FAILURES: dict[int, MaskFailure] = {NO_MASK: "late", CUT_NODE: "cut", NOTHING_ALLOWED: "nothing"}
_POLLS_BETWEEN_CHECKS = 1000
_NOT_READY = 600
"""cudaErrorNotReady."""
# Polls during about ten milliseconds. In longer steps the waiting thread naps between polls, which frees its core.
_POLLS_BEFORE_NAPS = 10_000
_NAP_S = 0.0002


class Rings:
    """The command ring and the result ring. Commands are numbered from 1 on.

    Each command is written, then the kernels that take it are launched on `stream`, then it is counted by `sent`.
    """

    def __init__(self, stream: Stream, prefill_chunk: int, pages_per_sequence: int, vocab_size: int):
        self._stream, self._vocab_size = stream, vocab_size
        self.command_bytes = command_bytes(prefill_chunk, pages_per_sequence)
        self._commands, self._results = host_buffers(
            RING_ENTRIES * self.command_bytes, RING_ENTRIES * RESULT_RECORD.itemsize
        )
        self._entries = self._commands.array(np.uint8).reshape(RING_ENTRIES, -1)
        records = self._results.array(RESULT_RECORD)
        # Python reads a memoryview several times faster than an array's scalars.
        self._places = [(memoryview(record["words"]), record) for record in records]
        # Kind and slots of the command that the place holds, if it only names sequences.
        self._written: list[tuple[int, tuple[int, ...]] | None] = [None] * RING_ENTRIES
        self._answers: list[Answer | None] = [None] * RING_ENTRIES
        self._last_number = 0

    @property
    def addresses(self) -> tuple[np.uint64, np.uint64]:
        """The addresses of the commands and of the results, as kernels take them."""
        return np.uint64(self._commands.device_address), np.uint64(self._results.device_address)

    @property
    def next_number(self) -> int:
        """The number of the command that is written next, or was written last and not sent yet."""
        return self._last_number + 1

    def write(self, step: Admit | Recall | Prefill) -> None:
        """Write the next command. Raises RequestError, with nothing written, for what the device cannot hold."""
        place = self._free_place()
        self._written[place] = None
        write_step(self._entries[place], step, self._vocab_size)

    def write_slots(self, kind: int, slots: tuple[int, ...]) -> None:
        """Write the next command, of a kind that only names sequences.

        In a steady run its place in the ring holds the same command already, and nothing is written.
        """
        place = self._free_place()
        if self._written[place] != (kind, slots):
            write_slots(self._entries[place], kind, slots)
            self._written[place] = kind, slots

    def write_certain(self, slots: tuple[int, ...], certain: tuple[tuple[int, ...], ...]) -> None:
        """Write the next command, of a decode step whose slots bring these certain tokens. Raises as `write` does."""
        place, written = self._free_place(), None if any(certain) else (DECODE_CERTAIN, slots)
        if written is None or self._written[place] != written:
            self._written[place] = None
            write_certain(self._entries[place], slots, certain, self._vocab_size)
            self._written[place] = written

    def sent(
        self, num_words: int, num_logprobs: tuple[int, ...], help_along: Callable[[], bool | None] | None = None,
        *, is_screened: bool = False,
    ) -> Answer:  # fmt: skip
        """Count the command just written, whose kernels are launched or wait to be. Return its pending answer.

        `num_words` words answer it, as many for each slot. `num_logprobs`: how many log-probabilities each sequence
        asked for, empty if the command has no results. `help_along` is called while somebody waits, as long as it
        returns True: it launches a step that still waits, or writes the masks of a tree's nodes. `is_screened`: if
        there are tokens, the last word of the record says how many a screened head computed exactly.
        """
        number = self._last_number = self._last_number + 1
        place = (number - 1) % RING_ENTRIES
        answer = Answer(number, num_words, num_logprobs, *self._places[place], self, help_along, is_screened)
        self._answers[place] = answer
        return answer

    def close(self) -> None:
        """Free the memory; the device must be done with it."""
        self._commands.close()
        self._results.close()

    def is_idle(self) -> bool:
        """Whether the device has done everything that was launched. Raises DeviceError after a fault."""
        from cupy.cuda import runtime

        # CuPy returns the status of this call, also that of a fault, and raises nothing.
        status = runtime.streamQuery(self._stream.ptr)
        if status not in (0, _NOT_READY):
            what = f"the GPU failed in the middle of a step: {runtime.CUDARuntimeError(status)}"
            raise DeviceError(what, fix="make a new process")
        return not status

    def _free_place(self) -> int:
        """Return the place of the next command, once the answer that lies there has been read."""
        place = self._last_number % RING_ENTRIES
        earlier = self._answers[place]
        if earlier is not None and not earlier.is_done():
            earlier.wait()
        return place


class Answer:
    """The pending result of one command, read from its place in the ring once all of its words are there."""

    __slots__ = (
        "_help_along", "_is_screened", "_num_logprobs", "_num_words", "_number", "_polls", "_record", "_result",
        "_rings", "_words",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        num_words: int,
        num_logprobs: tuple[int, ...],
        words: memoryview,
        record: np.void,
        rings: Rings,
        help_along: Callable[[], bool | None] | None,
        is_screened: bool,
    ):
        self._is_screened = is_screened
        self._number, self._num_words, self._num_logprobs = number, num_words, num_logprobs
        self._words, self._record, self._rings, self._help_along = words, record, rings, help_along
        self._result: StepResult | None = None
        self._polls = 0

    def is_done(self) -> bool:
        if self._result is None:
            self._result = self._read()
            if self._result is None:
                self._go_on()
        return self._result is not None

    def wait(self) -> StepResult:
        while not self.is_done():
            if self._polls < _POLLS_BEFORE_NAPS:
                sched_yield()  # sleep(0) sleeps for more than 50 us from Python 3.11 on
            else:
                sleep(_NAP_S)
        assert self._result is not None
        return self._result

    def _read(self) -> StepResult | None:
        """Return the result, or None if not all of it is there yet."""
        tokens = answered_tokens(self._words, self._number, self._num_words)
        if tokens is None:
            return None
        result = step_result(tokens, self._record, self._num_logprobs)
        # A launch of several steps may end before this step: then its head has not run, and has reported no count.
        if self._is_screened and any(token != NO_TOKEN for token in tokens):
            rescored = answered_tokens(self._words[-1:], self._number, 1)
            if rescored is None:
                return None
            (result.num_rescored,) = rescored
        return result

    def _go_on(self) -> None:
        """Help the answer along, and check now and then that it can still come. Raises DeviceError if it cannot."""
        if self._help_along is not None and not self._help_along():
            self._help_along = None
        self._polls += 1
        if self._polls % _POLLS_BETWEEN_CHECKS or not self._rings.is_idle():
            return
        if self._read() is None:
            raise DeviceError(f"the GPU finished step {self._number} without an answer", fix="report this as a bug")


class WithCertain:
    """The pending result of a decode step whose slots bring certain tokens. `pending` has a result for each row of the
    step; the last row of a slot has the token that follows its certain ones."""

    def __init__(self, pending: Pending, certain: tuple[tuple[int, ...], ...]):
        self._pending, self._certain = pending, certain

    def is_done(self) -> bool:
        return self._pending.is_done()

    def wait(self) -> StepResult:
        rows = self._pending.wait().slots
        newest = accumulate(1 + len(tokens) for tokens in self._certain)
        found = [(tokens, rows[end - 1]) for tokens, end in zip(self._certain, newest, strict=True)]
        return StepResult(tuple([
            replace(row, token_ids=(*tokens, *row.token_ids)) if row != SlotResult() else row for tokens, row in found
        ]))  # fmt: skip


class Nothing:
    """The empty result of a step that has no command for the device."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return StepResult()


def answered_tokens(words: memoryview, number: int, num_words: int) -> list[int] | None:
    """Return the tokens, or codes instead of one, in the words of a result; None if not all are of command `number`."""
    tokens, mark = [], number & 0xFFFFFFFF
    for word in words[:num_words].tolist():
        if word >> 32 != mark:
            return None
        tokens.append(word & NO_TOKEN)
    return tokens


def step_result(tokens: list[int], record: np.void, num_logprobs: tuple[int, ...]) -> StepResult:
    """Return what an answered command produced for its slots, one for each entry of `num_logprobs`.

    All slots have equally many words.
    """
    if len(tokens) == len(num_logprobs) and not any(num_logprobs):  # the usual case, which has to be quick
        found = [SlotResult((token,)) if token < NOTHING_ALLOWED else _without_token(token) for token in tokens]
        return StepResult(tuple(found))
    if not num_logprobs:
        return StepResult()
    each = len(tokens) // len(num_logprobs)
    rows = zip(range(0, len(tokens), each), num_logprobs, strict=True)
    return StepResult(tuple([_slot_result(tokens[row : row + each], record, row, count) for row, count in rows]))


def _slot_result(tokens: list[int], record: np.void, first_row: int, num_logprobs: int) -> SlotResult:
    """Return the tokens that were emitted, in rows from `first_row` on, with log-probabilities if any are wanted."""
    emitted = tuple([token for token in tokens if token < NOTHING_ALLOWED])
    result = SlotResult() if len(emitted) == len(tokens) else _without_token(tokens[len(emitted)])
    result.token_ids = emitted
    if num_logprobs:
        entries = record["logprobs"][first_row:]
        result.logprobs = tuple([_token_logprobs(*pair) for pair in zip(emitted, entries, strict=False)])
    return result


def _without_token(code: int) -> SlotResult:
    """Return the result of a row that has this code instead of a token."""
    return SlotResult(non_finite=code == NON_FINITE, mask_failure=_MASK_FAILURES.get(code))


def _token_logprobs(token: int, entry: np.void) -> TokenLogprobs:
    count = int(entry["num_top"])
    top = tuple(zip(entry["top_ids"][:count].tolist(), entry["top_logprobs"][:count].tolist(), strict=True))
    return TokenLogprobs(token, float(entry["logprob"]), top)
