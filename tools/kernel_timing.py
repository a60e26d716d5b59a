"""The time of what is enqueued on a stream, and how fast the device's products can be."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

REPLAYS = 15


def median_us(stream: Any, enqueue: Callable[[], None]) -> float:
    """Of a graph of everything that is enqueued, in microseconds."""
    from cupy.cuda import Event, get_elapsed_time

    enqueue()
    stream.synchronize()
    with stream:
        stream.begin_capture()
        enqueue()
        graph = stream.end_capture()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = Event(), Event()
        start.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        times.append(get_elapsed_time(start, end) * 1e3)
    return statistics.median(times[2:])


def product_ceiling(device: Any) -> float:
    """Operations a second of the library's product of [4096, 8192] and [16384, 8192]; 1 where it is absent."""
    import cupy

    from cpmrt.cuda.driver.blaslt import CublasLt, CublasLtError
    from cpmrt.dtypes import DType

    rows, columns, depth = 4096, 16384, 8192
    stream = cupy.cuda.Stream(non_blocking=True)
    words = np.random.default_rng(0).integers(0, 1 << 16, columns * depth, dtype=np.uint16) & 0x80FF | 0x3C00
    w, y, workspace = cupy.asarray(words), cupy.empty(rows * columns, np.uint16), cupy.empty(32 << 20, np.uint8)
    try:
        with CublasLt(workspace.data.ptr, workspace.nbytes) as library:
            plan = library.plan(rows, columns, depth, DType.BFLOAT16)
            operands = (y.data.ptr, w.data.ptr, w.data.ptr)
            us = median_us(stream, lambda: library.matmul(plan, *operands, stream.ptr))
    except CublasLtError:
        return 1.0
    return 2e6 * rows * columns * depth / us
