"""Measures how fast this GPU reads its memory, which is the ceiling that decoding is held against."""

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
"""A block reads so much in one pass: 8 loads of 16 bytes a thread."""

_BLOCKS_PER_SM = 4
_MOST_BYTES = 2 << 30
_RUNS, _READS_PER_RUN = 15, 4


def read_bandwidth(device: Device) -> float:
    """Return bytes a second: the median of runs timed by events, each of several passes over 2 GiB of random data.

    Half of what is free is taken where that is less; all of it is given back. Raises KernelCompileError, and
    MemoryPlanError where not even one pass of all blocks fits.
    """
    import cupy

    grid = _BLOCKS_PER_SM * device.num_sms
    num_tiles = num_tiles_within(device.free_bytes() // 2, grid)
    stream, modules = cupy.cuda.Stream(non_blocking=True), Modules(device.arch, DType.BFLOAT16)
    # Memory of its own: CuPy's pool would keep it from the model that is loaded next.
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
    """Return how many tiles `grid` blocks read of at most `num_bytes`, each as many, so that none reads alone."""
    rounds = min(num_bytes, _MOST_BYTES) // (grid * TILE_BYTES)
    if not rounds:
        needed = f"at least {2 * grid * TILE_BYTES >> 20} MiB free"
        raise MemoryPlanError("no memory to measure the read bandwidth", expected=needed, fix="free GPU memory")
    return rounds * grid


def pci_bus_id(device: Device) -> str:
    """Return the name of the GPU to NVML, whose indices are not CUDA's, such as "0000:3B:00.0"."""
    import cupy

    found: str = cupy.cuda.runtime.deviceGetPCIBusId(device.index)
    return found
