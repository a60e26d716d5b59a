"""From read bytes to the device: a page-locked ring, copied or converted on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cupy.cuda import Event, Stream, runtime

from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.driver.host_memory import HostBuffer
from cpmrt.cuda.driver.launch import launch
from cpmrt.cuda.load.read import CONVERT_16BIT, CONVERT_FLOAT32, NUM_SLOTS, SLOT_BYTES, ReadJob
from cpmrt.dtypes import Array, DType
from cpmrt.errors import CheckpointError, quoted

_BLOCK = 256
_MAX_GRID = 512


class Upload:
    """The `loader.Target` of a device, for one list of jobs. The end of the `with` block waits and frees the ring."""

    def __init__(self, arena: int, jobs: Sequence[ReadJob], device_index: int, modules: Modules):
        self._arena, self._device_index, self._dtype = arena, device_index, modules.dtype
        num_slots = max(1, min(NUM_SLOTS, len(jobs)))
        converted = [job for job in jobs if job.stored not in (None, modules.dtype)]
        self._converters = {
            stored: modules.kernel(CONVERT_FLOAT32 if stored is DType.FLOAT32 else CONVERT_16BIT, {})
            for stored in {job.stored for job in converted}
        }
        self._flags = {job.tensor: index for index, job in enumerate(converted)}
        self._paths = {job.tensor: job.path for job in converted}
        self.stream = Stream(non_blocking=True)
        self._next_slot = 0
        self._events = [Event(block=True, disable_timing=True) for _ in range(num_slots)]
        self._ring = HostBuffer(num_slots * SLOT_BYTES)
        try:
            self._overflow = HostBuffer(4 * max(len(converted), 1))
        except BaseException:
            self._ring.close()
            raise
        ring = self._ring.array(np.uint8).data
        self._slots = [ring[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] for slot in range(num_slots)]

    @property
    def slots(self) -> Sequence[memoryview]:
        return self._slots

    def wait(self, slot: int) -> None:
        """Return once the device has read what was submitted in `slot`."""
        # A new thread is on device 0 until it says otherwise.
        runtime.setDevice(self._device_index)
        self._events[slot].synchronize()

    def submit(self, slot: int, job: ReadJob) -> None:
        """Copy or convert the job's bytes to the arena, in the order of the stream."""
        source, target = slot * SLOT_BYTES, self._arena + job.destination
        if job.stored in (None, self._dtype):
            kind = runtime.memcpyHostToDevice
            runtime.memcpyAsync(target, self._ring.address + source, job.nbytes, kind, self.stream.ptr)
        else:
            count = job.num_elements
            flag = self._overflow.device_address + 4 * self._flags[job.tensor]
            addresses = (target, flag, self._ring.device_address + source)
            args = (*(np.uint64(address) for address in addresses), np.int32(count))
            launch(self.stream, self._converters[job.stored], min(-(-count // _BLOCK), _MAX_GRID), _BLOCK, 0, args)
        self._events[slot].record(self.stream)

    def put(self, destination: int, words: Array) -> None:
        """Copy words of the host to byte `destination` of the arena; not while a `load` is under way."""
        data = np.ascontiguousarray(words).reshape(-1).view(np.uint8)
        for begin in range(0, data.size, SLOT_BYTES):
            piece = data[begin : begin + SLOT_BYTES]
            slot = self._next_slot = (self._next_slot + 1) % len(self._slots)
            self.wait(slot)
            self._slots[slot][: piece.size] = piece.data
            target, start = self._arena + destination + begin, self._ring.address + slot * SLOT_BYTES
            runtime.memcpyAsync(target, start, piece.size, runtime.memcpyHostToDevice, self.stream.ptr)
            self._events[slot].record(self.stream)

    def finish(self) -> None:
        """Wait for everything submitted. Raises CheckpointError if a value was beyond the range of float16."""
        self.stream.synchronize()
        flags = self._overflow.array(np.uint32)
        for tensor, index in self._flags.items():
            if flags[index]:
                raise CheckpointError(
                    f"{self._paths[tensor]}: tensor {quoted(tensor)} has values beyond float16",
                    fix="use dtype bfloat16",
                )

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stream.synchronize()
        finally:
            self._ring.close()
            self._overflow.close()
