"""The GPU for `bench_kernels.py`: allocates memory, fills it, and times kernels on a stream."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import cupy
import numpy as np
from cupy.cuda import Event, get_elapsed_time

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.blaslt import CublasLt, CublasLtError
from cpmrt.cuda.driver.device import open_device
from cpmrt.cuda.load.random import load_random
from cpmrt.cuda.load.repack import Destination
from cpmrt.cuda.step.rings import Rings
from cpmrt.dtypes import Array, DType
from cpmrt.memory.arena import Arena
from cpmrt.memory.plan import MemoryPlan
from cpmrt.tensor_spec import TensorSpec

REPLAYS = 15


class Gpu:
    """The first GPU and a stream of its own."""

    has_library = True

    def __init__(self) -> None:
        self.device, self.stream = open_device(), cupy.cuda.Stream(non_blocking=True)

    def arena(self, plan: MemoryPlan) -> Arena:
        """Allocate the arena of a plan, filled with zeros."""
        pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(plan.total_bytes), 0)
        with self.stream:
            pointer.memset(0, plan.total_bytes)
        return Arena(plan, cupy.ndarray((plan.total_bytes,), cupy.uint8, pointer))

    def rings(self, max_context: int, vocab_size: int) -> Rings:
        """Make the rings in host memory, for kernels that write results."""
        return Rings(self.stream, 1, max_context, vocab_size)

    def put(self, array: DeviceArray, values: Array | int) -> None:
        """Copy values to the front of an array; an int fills all of it."""
        with self.stream:
            if isinstance(values, int):
                array.fill(values)
            else:
                array[: len(values)].set(np.ascontiguousarray(values, array.dtype))
        self.stream.synchronize()

    def randomise(self, launcher: Launcher, arena: Arena, specs: Sequence[TensorSpec]) -> None:
        """Fill weights, and every other region that `specs` name, with random numbers."""
        regions = {region.name: region for region in arena.plan.regions}
        load_random(specs, Destination(arena.buffer.data.ptr, regions, self.device, launcher), seed=0)

    def microseconds(self, enqueue: Callable[[], None]) -> float:
        """Return the median time, in us, of a CUDA graph of all launches that `enqueue` makes."""
        enqueue()
        self.stream.synchronize()
        with self.stream:
            self.stream.begin_capture()
            enqueue()
            graph = self.stream.end_capture()
        times = []
        for _ in range(REPLAYS + 2):
            start, end = Event(), Event()
            start.record(self.stream)
            graph.launch(self.stream)
            end.record(self.stream)
            end.synchronize()
            times.append(get_elapsed_time(start, end) * 1e3)
        return statistics.median(times[2:])

    def product_ceiling(self) -> float:
        """Return the operations a second of cuBLASLt's product of [4096, 8192] and [16384, 8192]; 1 without it."""
        rows, columns, depth = 4096, 16384, 8192
        words = np.random.default_rng(0).integers(0, 1 << 16, columns * depth, dtype=np.uint16) & 0x80FF | 0x3C00
        w, y, workspace = cupy.asarray(words), cupy.empty(rows * columns, np.uint16), cupy.empty(32 << 20, np.uint8)
        try:
            with CublasLt(workspace.data.ptr, workspace.nbytes) as library:
                plan = library.plan(rows, columns, depth, DType.BFLOAT16)
                operands = (y.data.ptr, w.data.ptr, w.data.ptr)
                us = self.microseconds(lambda: library.matmul(plan, *operands, self.stream.ptr))
        except CublasLtError:
            return 1.0
        return 2e6 * rows * columns * depth / us
