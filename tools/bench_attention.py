"""Times of the attention kernels alone, in CUDA graphs over enough layers that the L2 never holds a key.

python tools/bench_attention.py [portable]
"""

from __future__ import annotations

import sys
from typing import Any

import cupy
import numpy as np

from cpmrt.cuda.attention_plan import plan_decode_attention, plan_prefill_attention
from cpmrt.cuda.compiler import Modules
from cpmrt.cuda.device import open_device
from cpmrt.cuda.launch import launch
from cpmrt.dtypes import DType
from cpmrt.memory.kv_pages import PAGE_SIZE

SHAPES = {"8b": (32, 2, 128), "0.5b": (16, 2, 64)}
DEVICE = open_device()
MODULES = Modules(DEVICE.arch, DType.BFLOAT16)
STREAM = cupy.cuda.Stream(non_blocking=True)
COLD_BYTES = 400 << 20


def random_words(count: int) -> Any:
    """bf16 words of about N(0, 1)."""
    block = cupy.random.standard_normal(min(count, 1 << 24), dtype=cupy.float32)
    words = (block.view(cupy.uint32) >> 16).astype(cupy.uint16)
    return cupy.resize(words, count)


def time_graph(launches: list[Any], repeats: int = 15) -> float:
    """Microseconds of one launch: median over replays of a graph of all."""
    for call in launches[:1]:
        call()
    STREAM.synchronize()
    STREAM.begin_capture()
    for call in launches:
        call()
    graph = STREAM.end_capture()
    times = []
    for _ in range(repeats + 2):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(STREAM)
        graph.launch(STREAM)
        end.record(STREAM)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / len(launches))
    return float(np.median(times[2:]))


def bench_decode(shape: str, rows: int, length: int, *, pdl: bool, portable: bool) -> None:
    num_heads, num_kv_heads, head_dim = SHAPES[shape]
    plan = plan_decode_attention(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, max_context=131072, max_rows=64,
        arch=int(DEVICE.arch.removeprefix("sm_")), num_sms=DEVICE.num_sms, portable=portable,
    )  # fmt: skip
    kernel = MODULES.kernel("decode_attention.cu", "decode_attention", plan.constants)
    pages = -(-length // PAGE_SIZE)
    num_bytes = rows * length * num_kv_heads * head_dim * 4
    layers = max(4, min(256, COLD_BYTES // num_bytes))
    page_elements = num_kv_heads * PAGE_SIZE * head_dim
    kv = random_words(2 * layers * rows * pages * page_elements).reshape(2, layers, -1)
    q, out = random_words(rows * num_heads * head_dim), cupy.zeros(rows * num_heads * head_dim, np.uint16)
    tables = cupy.asarray(np.random.default_rng(0).permutation(rows * pages).astype(np.int32))
    positions = cupy.full(rows, length - 1, np.int32)
    slots = cupy.arange(rows, dtype=np.int32)
    partials = cupy.zeros(plan.partials, np.float32)
    arrivals = cupy.zeros(plan.arrivals, np.int32)
    cupy.cuda.get_current_stream().synchronize()

    def call(layer: int) -> Any:
        args = [out, partials, arrivals, q, kv[0, layer], kv[1, layer], positions, slots, tables, None, None,
                np.int32(plan.num_splits), np.int32(num_kv_heads), np.int32(pages),
                np.float32(head_dim**-0.5)]  # fmt: skip
        return lambda: launch(STREAM, kernel, plan.grid(rows), plan.threads, plan.shared_bytes, args, pdl=pdl)

    micros = time_graph([call(layer) for layer in range(layers)])
    rate = num_bytes / micros / 1e6
    print(f"decode  {shape:5} T={rows:<3} {length:>7} {'pdl' if pdl else '   '} {micros:9.2f} us {rate:6.2f} TB/s "
          f"{rate / 4.55:5.0%}  {plan.num_splits} splits", flush=True)  # fmt: skip


def bench_prefill(shape: str, start: int, count: int) -> None:
    num_heads, num_kv_heads, head_dim = SHAPES[shape]
    plan = plan_prefill_attention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    kernel = MODULES.kernel("prefill_attention.cu", "prefill_attention", plan.constants)
    pages = -(-(start + count) // PAGE_SIZE)
    kv = random_words(2 * pages * num_kv_heads * PAGE_SIZE * head_dim).reshape(2, -1)
    q, out = random_words(count * num_heads * head_dim), cupy.zeros(count * num_heads * head_dim, np.uint16)
    tables = cupy.asarray(np.random.default_rng(0).permutation(pages).astype(np.int32))
    chunk = cupy.asarray(np.array([0, start, count], np.int32))
    cupy.cuda.get_current_stream().synchronize()
    args = [out, q, kv[0], kv[1], tables, chunk, np.int32(num_kv_heads), np.int32(pages), np.float32(head_dim**-0.5)]
    grid = (plan.blocks_per_tile, plan.tiles(count))
    micros = time_graph([lambda: launch(STREAM, kernel, grid, plan.threads, plan.shared_bytes, args)] * 4, 7)
    flops = 4.0 * num_heads * head_dim * count * (start + (count + 1) / 2)
    print(f"prefill {shape:5} start {start:>6} rows {count:>5} {micros:9.1f} us {flops / micros / 1e6:6.0f} TFLOP/s",
          flush=True)  # fmt: skip


DECODE = [("8b", 1, 1024), ("8b", 1, 1088), ("8b", 1, 4096), ("8b", 1, 32768), ("8b", 1, 131072), ("8b", 8, 1088),
          ("8b", 64, 1088), ("0.5b", 1, 1088), ("0.5b", 1, 32768)]  # fmt: skip
PREFILL = [("8b", 0, 1024), ("8b", 0, 4096), ("8b", 4096, 4096), ("8b", 28672, 4096), ("0.5b", 0, 4096)]


def main() -> None:
    for pdl in (True, False):
        for shape, rows, length in DECODE:
            bench_decode(shape, rows, length, pdl=pdl, portable="portable" in sys.argv)
    for shape, start, count in PREFILL:
        bench_prefill(shape, start, count)


if __name__ == "__main__":
    main()
