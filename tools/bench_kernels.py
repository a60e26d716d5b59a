"""Time each hot kernel alone at real shapes: python tools/bench_kernels.py --kernel linear [--rows 1,8] [--json FILE].

A measurement is a CUDA graph of launches over rotating copies of the weight, together larger than the L2, with
dependent-launch edges; the number is the median of replays, divided by the launches. Bytes are the weight's. A family
of kernels is one function in `FAMILIES` that yields `Case`s.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpmrt.cuda.compiler import Modules
from cpmrt.cuda.device import Device, open_device
from cpmrt.cuda.launch import launch
from cpmrt.cuda.linear_plan import BLOCK_THREADS, DeviceLimits, plan_linear
from cpmrt.dtypes import DType

REPLAYS = 15
POOL_BYTES = 2 << 30

LINEAR_SHAPES = {
    "8B qkv": ("qkv", 4608, 4096, 128),
    "8B o": ("residual", 4096, 4096, 0),
    "8B gate_up": ("gate_up", 32768, 4096, 0),
    "8B down": ("residual", 4096, 16384, 0),
    "8B head": ("head", 73448, 4096, 0),
    "0.5B qkv": ("qkv", 1280, 1024, 64),
    "0.5B o": ("residual", 1024, 1024, 0),
    "0.5B gate_up": ("gate_up", 8192, 1024, 0),
    "0.5B down": ("residual", 1024, 4096, 0),
    "0.5B head": ("head", 73448, 1024, 0),
}
NUM_KV_HEADS, MAX_CONTEXT, MAX_ROWS = 2, 4096, 64


@dataclass(frozen=True)
class Case:
    """One line of the table: `enqueue(i, pdl)` launches on the i-th of `copies` copies of its large operand."""

    name: str
    rows: int
    num_bytes: int
    copies: int
    enqueue: Callable[[int, bool], None]


@dataclass(frozen=True)
class Bench:
    """The device, one stream, and a pool of random storage words that stands for weights."""

    cupy: Any
    device: Device
    stream: Any
    modules: Modules
    pool: Any
    portable: bool


def linear_cases(bench: Bench, row_counts: list[int]) -> Iterator[Case]:
    """Every product of linear.cu at the shapes of the 8B and the 0.5B model."""
    cupy, words = bench.cupy, bench.cupy.uint16
    activations = cupy.full(MAX_ROWS * 16384, 0x3F80, words)
    out = cupy.zeros(MAX_ROWS * 73448 * 2, words)
    pages = cupy.zeros((2, MAX_ROWS * NUM_KV_HEADS * 64 * 128), words)
    rope = cupy.zeros(2 * MAX_CONTEXT * 64, cupy.float32)
    slots = cupy.arange(MAX_ROWS, dtype=cupy.int32)
    positions = slots + 1000
    tables = cupy.ascontiguousarray(cupy.repeat(slots[:, None], MAX_CONTEXT // 64, axis=1))
    capability = int(bench.device.arch.removeprefix("sm_"))
    limits = DeviceLimits(
        bench.device.num_sms, bench.device.shared_bytes_per_block, capability >= 90 and not bench.portable
    )
    eps = np.float32(1e-5)
    for name, (product, out_features, in_features, head_dim) in LINEAR_SHAPES.items():
        size = out_features * in_features
        copies = max(2, min(64, bench.pool.size // size))
        stride = min(size, (bench.pool.size - size) // (copies - 1) // 128 * 128)
        for rows in row_counts:
            plan = plan_linear(product, out_features, in_features, rows, limits)
            constants = plan.constants | ({"HEAD_DIM": head_dim} if head_dim else {})
            if bench.portable:
                constants["CPMRT_PORTABLE"] = 1
            kernel = bench.modules.kernel("linear.cu", f"linear_{product}", constants)
            count = np.int32(rows)
            width = np.int32(out_features // 2 if product == "gate_up" else out_features)

            def arguments(
                weight: Any, product: str = product, count: Any = count, width: Any = width, d: int = head_dim
            ) -> tuple[Any, ...]:
                if product == "residual":
                    return out, activations, weight, None, count, width, np.float32(1e-3)
                if product == "gate_up":
                    return out, activations, activations, weight, count, width, eps
                if product == "head":
                    return out, activations, activations, weight, count, width, eps, np.float32(1)
                heads = np.int32(int(width) // d - 2 * NUM_KV_HEADS)
                state = (rope, positions, slots, tables, count, heads, np.int32(NUM_KV_HEADS))
                sizes = (np.int32(MAX_CONTEXT // 64), np.int32(MAX_CONTEXT), eps)
                return out, pages[0], pages[1], activations, activations, weight, None, *state, *sizes

            def enqueue(
                i: int,
                pdl: bool,
                kernel: Any = kernel,
                plan: Any = plan,
                stride: int = stride,
                arguments: Any = arguments,
            ) -> None:
                weight = bench.pool[i * stride :]
                launch(bench.stream, kernel, plan.grid, BLOCK_THREADS, plan.shared_bytes, arguments(weight), pdl=pdl)

            yield Case(name, rows, size * 2, copies, enqueue)


FAMILIES: dict[str, Callable[[Bench, list[int]], Iterator[Case]]] = {"linear": linear_cases}


def microseconds(bench: Bench, case: Case) -> float:
    """Median time of one launch inside a graph of `case.copies`."""
    cupy = bench.cupy
    case.enqueue(0, False)
    bench.stream.synchronize()
    bench.stream.begin_capture()
    for i in range(case.copies):
        case.enqueue(i, i > 0)
    graph = bench.stream.end_capture()
    times = []
    for _ in range(REPLAYS + 2):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(bench.stream)
        graph.launch(bench.stream)
        end.record(bench.stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) * 1e3 / case.copies)
    return statistics.median(times[2:])


def open_bench(portable: bool) -> Bench:
    import cupy

    device = open_device()
    stream = cupy.cuda.Stream(non_blocking=True)
    # Sign and 8 bits of mantissa are random, the exponent is that of 1/128: finite sums, ordinary power draw.
    tile = np.random.default_rng(0).integers(0, 1 << 16, 1 << 24, dtype=np.uint16) & 0x80FF | 0x3C00
    pool = cupy.tile(cupy.asarray(tile), POOL_BYTES // 2 // tile.size)
    cupy.cuda.Device().synchronize()
    return Bench(cupy, device, stream, Modules(device.arch, DType.BFLOAT16), pool, portable)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=sorted(FAMILIES), required=True)
    parser.add_argument("--rows", default="1,8,16,32,64", help="rows of a step, separated by commas")
    parser.add_argument("--limit", type=float, default=4.55, help="read bandwidth of the device in TB/s")
    parser.add_argument("--portable", action="store_true", help="the path of devices below sm_90")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = open_bench(options.portable)
    table = []
    for case in FAMILIES[options.kernel](bench, [int(rows) for rows in options.rows.split(",")]):
        us = microseconds(bench, case)
        rate = case.num_bytes / us / 1e3
        percent = rate / options.limit / 10
        table.append({"kernel": case.name, "rows": case.rows, "us": us, "GB/s": rate, "percent": percent})
        print(f"{case.name:14s} T={case.rows:<3d} {us:8.2f} us {rate:6.0f} GB/s {percent:5.1f} %", flush=True)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
