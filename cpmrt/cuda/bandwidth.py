"""Measures how fast this GPU reads its memory, the upper limit that decoding speeds are compared with."""

from __future__ import annotations

from statistics import median

import numpy as np

from cpmrt.cuda.build.modules import Modules
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.driver.launch import launch
from cpmrt.cuda.load.random import FILL_NORMAL
from cpmrt.dtypes import DType
from cpmrt.errors import MemoryPlanError

READ_BANDWIDTH = KernelSpec(
    "read_bandwidth", "load/bandwidth.cu", hot=True, reason="what the device's memory gives at best"
)
BLOCK = 256
TILE_BYTES = 32 << 10
"""Bytes that a block reads in one pass: 8 loads of 16 bytes a thread."""

_BLOCKS_PER_SM = 4
_MOST_BYTES = 2 << 30
_RUNS, _READS_PER_RUN = 15, 4


def read_bandwidth(device: Device) -> float:
    """Return the read bandwidth in bytes a second: the median of runs timed by events.

    Each run makes several passes over 2 GiB of random data, or over half of the free memory where that is less; all of
    it is freed again. Raises KernelCompileError, and MemoryPlanError where not even one pass of all blocks fits.
    """
    import cupy

    grid = _BLOCKS_PER_SM * device.num_sms
    num_tiles = num_tiles_within(device.free_bytes() // 2, grid)
    stream, modules = cupy.cuda.Stream(non_blocking=True), Modules(device.arch, DType.BFLOAT16)
    # Not from CuPy's pool, which would keep the memory from the model that is loaded next.
    data, out = cupy.cuda.Memory(num_tiles * TILE_BYTES), cupy.cuda.Memory(grid * BLOCK // 32 * 4)
    num_words = np.int64(num_tiles * TILE_BYTES // 2)
    fill = (np.uint64(data.ptr), num_words, np.uint64(1), np.float32(0), np.float32(1))
    launch(stream, modules.kernel(FILL_NORMAL, {}), grid, BLOCK, 0, fill)
    kernel = modules.kernel(READ_BANDWIDTH, {})
    read = (np.uint64(out.ptr), np.uint64(data.ptr), np.int32(num_tiles))
    seconds: list[float] = []
    for _ in range(_RUNS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        for _ in range(_READS_PER_RUN):
            launch(stream, kernel, grid, BLOCK, 0, read)
        end.record(stream)
        end.synchronize()
        seconds.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return _READS_PER_RUN * num_tiles * TILE_BYTES / median(seconds)


def num_tiles_within(num_bytes: int, grid: int) -> int:
    """Return how many tiles to read: at most `num_bytes` and 2 GiB, and a multiple of `grid`, so as many by each block.

    A block with more tiles than the others would read alone at the end. Raises MemoryPlanError.
    """
    rounds = min(num_bytes, _MOST_BYTES) // (grid * TILE_BYTES)
    if not rounds:
        needed = f"at least {2 * grid * TILE_BYTES >> 20} MiB free"
        raise MemoryPlanError("no memory to measure the read bandwidth", expected=needed, fix="free GPU memory")
    return rounds * grid


def pci_bus_id(device: Device) -> str:
    """Return the GPU's PCI bus id, such as "0000:3B:00.0". NVML finds the GPU by it, as its indices are not CUDA's."""
    import cupy

    found: str = cupy.cuda.runtime.deviceGetPCIBusId(device.index)
    return found
