"""The two rings in mapped host memory: commands to the device, results from it. Nothing else crosses in a step."""

from __future__ import annotations

from os import sched_yield
from time import sleep
from typing import Any

import numpy as np
from cupy.cuda import runtime

from cpmrt.cuda.driver.graphs import Graphs
from cpmrt.cuda.driver.host_memory import HostBuffer
from cpmrt.cuda.step.structs import (
    RESULT_RECORD,
    RING_ENTRIES,
    answered_tokens,
    command_bytes,
    path_result,
    slot_result,
    write_decode,
    write_speculate,
)
from cpmrt.dtypes import Array
from cpmrt.errors import DeviceError
from cpmrt.executor import StepResult

_POLLS_BETWEEN_CHECKS = 1000
_NOT_READY = 600
"""cudaErrorNotReady."""
# Some ten milliseconds. Steps that take longer do not need a core to themselves while they run.
_POLLS_BEFORE_NAPS = 10_000
_NAP_S = 0.0002


class Rings:
    """Numbers commands from 1 on and reads their answers. `stream` runs the kernels that take them, `graphs` starts
    them: each command is written before its graph is run, and counted (`sent`) after."""

    def __init__(self, stream: Any, graphs: Graphs, prefill_chunk: int, pages_per_sequence: int):
        self._stream, self._graphs = stream, graphs
        self.command_bytes = command_bytes(prefill_chunk, pages_per_sequence)
        self._commands = HostBuffer(RING_ENTRIES * self.command_bytes)
        self._results = HostBuffer(RING_ENTRIES * RESULT_RECORD.itemsize)
        self._entries = self._commands.array(np.uint8, (RING_ENTRIES, self.command_bytes))
        self._records = self._results.array(RESULT_RECORD, (RING_ENTRIES,))
        # Python reads a memoryview several times faster than an array's scalars.
        self._words = [memoryview(words) for words in self._records["words"]]
        # Slots of the Decode, or the slot of the Speculate, that the place holds.
        self._written: list[tuple[int, ...] | int | None] = [None] * RING_ENTRIES
        self._answers: list[Answer | None] = [None] * RING_ENTRIES
        self._last_number = 0
        self._polls = 0

    @property
    def addresses(self) -> tuple[np.uint64, np.uint64]:
        """Of the commands and of the results, as kernels take them."""
        return np.uint64(self._commands.device_address), np.uint64(self._results.device_address)

    def next_entry(self) -> Array:
        """The bytes of the next command, free to be written: the answer that shares its place has been read."""
        place = self._free_place()
        self._written[place] = None
        entry: Array = self._entries[place]
        return entry

    def write_decode(self, slots: tuple[int, ...]) -> None:
        """The next command. In a steady run its place holds the same slots already, and nothing is written."""
        place = self._free_place()
        if self._written[place] != slots:
            write_decode(self._entries[place], slots)
            self._written[place] = slots

    def write_speculate(self, slot: int) -> None:
        """The next command, likewise."""
        place = self._free_place()
        if self._written[place] != slot:
            write_speculate(self._entries[place], slot)
            self._written[place] = slot

    def sent(self, num_rows: int, num_logprobs: tuple[int, ...], *, is_path: bool = False) -> Answer:
        """Count the command just written and run. `num_rows` words answer it: one for each of the first slots, or,
        with `is_path`, all for the one slot."""
        self._last_number += 1
        answer = Answer(self, self._last_number, num_rows, num_logprobs, is_path)
        self._answers[(self._last_number - 1) % RING_ENTRIES] = answer
        return answer

    def read(self, number: int, num_rows: int, num_logprobs: tuple[int, ...], is_path: bool) -> StepResult | None:
        """The answer of a command, None if it is not there yet. Raises DeviceError if it will never come."""
        place = (number - 1) % RING_ENTRIES
        tokens = answered_tokens(self._words[place], number, num_rows)
        if tokens is None:
            if number > self._last_number - self._graphs.num_waiting:
                self._graphs.start_waiting()
            self._polls += 1
            if self._polls % _POLLS_BETWEEN_CHECKS == 0:
                self._check_stream(number, num_rows)
            return None
        record, rows = self._records[place], enumerate(num_logprobs)
        if is_path:
            return StepResult((path_result(tokens, record, num_logprobs[0]),))
        return StepResult(tuple([slot_result(tokens[row], record, row, wanted) for row, wanted in rows]))

    def _free_place(self) -> int:
        place = self._last_number % RING_ENTRIES
        earlier = self._answers[place]
        if earlier is not None and not earlier.is_read:
            earlier.wait()
        return place

    def close(self) -> None:
        """Free the memory; the device must be done with it."""
        self._commands.close()
        self._results.close()

    def _check_stream(self, number: int, num_rows: int) -> None:
        # CuPy returns the status of this call, also that of a fault, and raises nothing.
        status = runtime.streamQuery(self._stream.ptr)
        if status == _NOT_READY:
            return
        if status:
            what = f"the GPU failed in the middle of a step: {runtime.CUDARuntimeError(status)}"
            raise DeviceError(what, fix="make a new process")
        if answered_tokens(self._words[(number - 1) % RING_ENTRIES], number, num_rows) is None:
            raise DeviceError(f"the GPU finished step {number} without an answer", fix="report this as a bug")


class Answer:
    """The pending result of one command."""

    __slots__ = ("_is_path", "_num_logprobs", "_num_rows", "_number", "_result", "_rings")

    def __init__(self, rings: Rings, number: int, num_rows: int, num_logprobs: tuple[int, ...], is_path: bool):
        self._rings, self._number, self._num_rows = rings, number, num_rows
        self._num_logprobs, self._is_path = num_logprobs, is_path
        self._result: StepResult | None = None

    @property
    def is_read(self) -> bool:
        """Whether the result is known here: its place in the ring may be taken."""
        return self._result is not None

    def is_done(self) -> bool:
        if self._result is None:
            self._result = self._rings.read(self._number, self._num_rows, self._num_logprobs, self._is_path)
        return self._result is not None

    def wait(self) -> StepResult:
        polls = 0
        while self._result is None and not self.is_done():
            polls += 1
            if polls < _POLLS_BEFORE_NAPS:
                sched_yield()  # sleep(0) sleeps for more than 50 us from Python 3.11 on
            else:
                sleep(_NAP_S)
        assert self._result is not None
        return self._result


class Nothing:
    """The pending result of a step that the device does not see."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return StepResult()
