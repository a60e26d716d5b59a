"""The two rings in mapped host memory: commands to the device, results from it. Nothing else crosses in a step."""

from __future__ import annotations

from time import sleep
from typing import Any

import numpy as np

from cpmrt.cuda.host_buffers import HostBuffer
from cpmrt.cuda.slot_state import RESULT_RECORD, RING_ENTRIES, command_bytes, is_answered, read_row, write_decode
from cpmrt.dtypes import Array
from cpmrt.errors import DeviceError
from cpmrt.executor import StepResult

_POLLS_BETWEEN_CHECKS = 1000


class Rings:
    """Numbers commands from 1 on and waits for their answers. `stream` runs the kernels that take them."""

    def __init__(self, stream: Any, prefill_chunk: int):
        self._stream = stream
        self.command_bytes = command_bytes(prefill_chunk)
        self._commands = HostBuffer(RING_ENTRIES * self.command_bytes)
        self._results = HostBuffer(RING_ENTRIES * RESULT_RECORD.itemsize)
        self._entries = self._commands.array(np.uint8, (RING_ENTRIES, self.command_bytes))
        self._records = self._results.array(RESULT_RECORD, (RING_ENTRIES,))
        self._words = self._records["words"]
        self._decode_slots: list[tuple[int, ...] | None] = [None] * RING_ENTRIES
        self._outstanding: dict[int, Answer] = {}
        self._last_number = 0

    @property
    def addresses(self) -> tuple[np.uint64, np.uint64]:
        """Of the commands and of the results, as kernels take them."""
        return np.uint64(self._commands.device_address), np.uint64(self._results.device_address)

    def next_entry(self) -> Array:
        """The bytes of the next command, free to be written: the answer that shares its place has been read."""
        place = self._free_place()
        self._decode_slots[place] = None
        entry: Array = self._entries[place]
        return entry

    def write_decode(self, slots: tuple[int, ...]) -> None:
        """The next command. In a steady run its place holds the same slots already, and nothing is written."""
        place = self._free_place()
        if self._decode_slots[place] != slots:
            write_decode(self._entries[place], slots)
            self._decode_slots[place] = slots

    def sent(self, num_rows: int, num_logprobs: tuple[int, ...]) -> Answer:
        """Count the command just written and launched. It is answered by `num_rows` words."""
        self._last_number += 1
        answer = Answer(self, self._last_number, num_rows, num_logprobs)
        self._outstanding[self._last_number] = answer
        return answer

    def read(self, number: int, num_rows: int, num_logprobs: tuple[int, ...]) -> StepResult:
        """Wait for the answer of a command. Raises DeviceError if it will never come."""
        place, polls = (number - 1) % RING_ENTRIES, 0
        record, words, last = self._records[place], self._words[place], num_rows - 1
        # One word is cheap to poll; rows end at about the same time.
        while int(words[last]) >> 32 != number & 0xFFFFFFFF or not is_answered(record, number, num_rows):
            polls += 1
            if polls % _POLLS_BETWEEN_CHECKS == 0:
                self._check_stream(record, number, num_rows)
            sleep(0)
        self._outstanding.pop(number, None)
        return StepResult(tuple(read_row(record, row, count) for row, count in enumerate(num_logprobs)))

    def _free_place(self) -> int:
        earlier = self._outstanding.get(self._last_number + 1 - RING_ENTRIES)
        if earlier is not None:
            earlier.wait()
        return self._last_number % RING_ENTRIES

    def close(self) -> None:
        """Free the memory; the device must be done with it."""
        self._commands.close()
        self._results.close()

    def _check_stream(self, record: Any, number: int, num_rows: int) -> None:
        try:
            is_idle = self._stream.done
        except Exception as error:  # whatever the fault was, every call on this context reports it
            raise DeviceError(f"the GPU failed in the middle of a step: {error}", fix="make a new process") from error
        if is_idle and not is_answered(record, number, num_rows):
            raise DeviceError(f"the GPU finished step {number} without an answer", fix="report this as a bug")


class Answer:
    """The pending result of one command."""

    def __init__(self, rings: Rings, number: int, num_rows: int, num_logprobs: tuple[int, ...]):
        self._rings, self._number, self._num_rows, self._num_logprobs = rings, number, num_rows, num_logprobs
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        if self._result is None:
            self._result = self._rings.read(self._number, self._num_rows, self._num_logprobs)
        return self._result


class Nothing:
    """The pending result of a step that the device does not see."""

    def wait(self) -> StepResult:
        return StepResult()


