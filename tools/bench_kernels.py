"""Time each hot kernel alone, as the model launches it: python3 tools/bench_kernels.py [--kernel NAME] [--write].

A number is the median over replays of a CUDA graph with the launches of one kernel in a pass over the model's layers,
divided by their count: its operands, sizes and dependent-launch edges are the model's own. There are so many layers
that the L2 holds nothing of the pass before: weights stream from memory. What a pass leaves in the L2 in earnest (the
activations) is found there here too. Shares are of the read bandwidth and of the fastest large product that are
measured first. The steps' bookkeeping kernels are not here: they take commands, which only the executor writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np  # noqa: E402
from kernel_costs import Cost, Label, chunk_costs, packed_costs, product_costs, skinny_costs  # noqa: E402
from kernel_table import Line, markdown, replaced  # noqa: E402
from kernel_timing import median_us, product_ceiling  # noqa: E402
from planted_choices import TOGETHER, planted_choices  # noqa: E402
from sparse_evaluation.neighbours import unions  # noqa: E402

from cpmrt.bench.run import shape_folder  # noqa: E402
from cpmrt.config import SparseSetting  # noqa: E402
from cpmrt.cuda.bandwidth import read_bandwidth  # noqa: E402
from cpmrt.cuda.driver.device import open_device  # noqa: E402
from cpmrt.cuda.driver.launch import launch  # noqa: E402
from cpmrt.cuda.ops.gemm import Gemm  # noqa: E402
from cpmrt.errors import CpmrtError  # noqa: E402
from cpmrt.llm import LLM  # noqa: E402
from cpmrt.ops import KVPages, Rows, Selection  # noqa: E402

README = ROOT / "kernels_cu" / "README.md"
# So many layers that one kind of weight alone is larger than any L2.
LAYERS = {"minicpm4-8b": 8, "minicpm4-0.5b": 64}
PACKED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
SEQUENCES, SHORT, LONG, CHUNK = 64, 2048, 131072, 4096
DECODE_KEYS = ((1, 1088), (8, 1088), (64, 1088), (1, 4096), (1, 32768), (1, 131072))
PREFILL_STARTS = (0, 28672, 122880)
SELECTED_START, SELECTED_ROWS = 126976, 2048
# Blocks that 12 neighbours choose together: at random (None), and as a trained model does (tools/sparse_evaluation).
SELECTED_UNIONS = (None, 226)
COLD_BYTES = 400 << 20
MOST_LAUNCHES = 256


class Sieve:
    """Stands before the model's launcher and its products: only those with the wanted label pass. Counts all."""

    def __init__(self, executor: Any):
        self.launcher, self.library = executor._launcher, executor._gemm
        self.own = Gemm(executor.device, self.launcher, None, use_library=False)
        self.wanted: Label | None = None
        self.counts: Counter[Label] = Counter()
        self.uses_own = False
        executor._forward._ops._launch = executor._forward._ops._quantized._launch = self
        if executor._forward._ops.sparse is not None:
            executor._forward._ops.sparse._launch = self
        executor._forward._ops._gemm = self.product
        executor._steps._launch = self

    def __call__(self, file: str, name: str, sizes: Any, grid: Any, block: int, *args: Any, smem: int = 0) -> None:
        if self._passes((name, 0, sizes.get("IN_FEATURES", 0))):
            self.launcher(file, name, sizes, grid, block, *args, smem=smem)

    def product(self, y: Any, x: Any, w: Any, *, alpha: float = 1.0, beta: float = 0.0) -> None:
        """A product of a chunk."""
        if self._passes(("gemm" if self.uses_own else "cuBLASLt", *w.shape)):
            (self.own if self.uses_own else self.library)(y, x, w, alpha=alpha, beta=beta)

    def _passes(self, label: Label) -> bool:
        self.counts[label] += 1
        return label == self.wanted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.launcher, name)


class Bench:
    """A shape on the device, its kernels one by one. `ceilings` are of bytes and of operations, a second."""

    def __init__(self, shape: str, llm: LLM, ceilings: dict[str, float], wanted: str):
        self.shape, self.config, self.executor = shape, llm.config, llm.executor
        self.stream, self.arrays = self.executor._stream, self.executor._arrays
        self.sieve = Sieve(self.executor)
        self.ops = self.executor._forward._ops
        self._ceilings, self._wanted = ceilings, wanted
        self._fill()

    def decode(self, row_counts: Iterable[int]) -> Iterator[Line]:
        """The products and the sampler of a decode step."""
        costs = skinny_costs(self.config)
        for rows in row_counts:
            self._set_rows(np.arange(rows), np.full(rows, SHORT - 1))
            yield from self._each(partial(self.executor._forward.decode, rows), f"T={rows}", costs)
            sampled = {("sample", 0, 0): Cost("sample", "byte", 4.0 * rows * self.config.vocab_size)}
            yield from self._each(partial(self.executor._steps.sample, rows), f"T={rows}", sampled)

    def packed(self, row_counts: Iterable[int]) -> Iterator[Line]:
        """The products of a decode step with 4-bit weights."""
        for rows in row_counts:
            self._set_rows(np.arange(rows), np.full(rows, SHORT - 1))
            layers = partial(self.executor._forward.decode, rows)
            yield from self._each(layers, f"T={rows}", packed_costs(self.config, rows))

    def prefill(self) -> Iterator[Line]:
        """Everything in a chunk but attention, the products by the library and by the own kernel."""
        self._set_rows(np.zeros(CHUNK), np.arange(CHUNK))
        layers, case = partial(self.executor._forward.chunk, CHUNK), f"T={CHUNK}"
        yield from self._each(layers, case, product_costs(self.config, CHUNK, "cuBLASLt"))
        yield from self._each(layers, case, chunk_costs(self.config, CHUNK))
        self.sieve.uses_own = True
        yield from self._each(layers, case, product_costs(self.config, CHUNK, "gemm"))

    def decode_attention(self, rows: int, keys: int) -> Iterator[Line]:
        """Layers and slots take turns, so that no key is in the L2."""
        config, pages = self.config, (self.arrays["k_pages"], self.arrays["v_pages"])
        num_slots = len(self.arrays["block_tables"])
        self._set_rows(np.arange(num_slots), np.full(num_slots, keys - 1))
        tables, positions = self.arrays["block_tables"], self.arrays["positions"][:rows]
        windows = [self.arrays["slots"][first : first + rows] for first in range(0, num_slots - rows + 1, rows)]
        num_bytes = 4.0 * rows * keys * config.attention.kv_size
        turns = [(layer, slots) for slots in windows for layer in range(config.num_layers)]
        turns = turns[: min(MOST_LAUNCHES, int(COLD_BYTES // num_bytes) + 1)]

        def enqueue() -> None:
            out, q = self.arrays["attention"][:rows], self.arrays["q"][:rows]
            for layer, slots in turns:
                step = Rows(self.arrays["token_ids"][:rows], positions, slots, tables, is_prefill=False)
                kv = KVPages(pages[0][layer], pages[1][layer])
                self.ops.decode_attention(out, q, kv, step, config.attention.head_dim**-0.5)

        cost = {("decode_attention", 0, 0): Cost("decode_attention", "byte", num_bytes)}
        yield from self._each(enqueue, f"T={rows}, {keys:,} keys", cost)

    def prefill_attention(self, start: int) -> Iterator[Line]:
        """A chunk behind `start` keys."""
        config, (rows, arrays) = self.config, (CHUNK, self.arrays)
        self._set_chunk(start)
        step = Rows(
            arrays["token_ids"][:rows], arrays["positions"][:rows], arrays["slots"][:rows], arrays["block_tables"], True
        )

        def enqueue() -> None:
            for layer in range(2):
                pages = arrays["k_pages"][layer], arrays["v_pages"][layer]
                out, q = arrays["attention"][:rows], arrays["q"][:rows]
                self.ops.prefill_attention(out, q, *pages, step, config.attention.head_dim**-0.5)

        flops = 4.0 * config.attention.q_size * rows * (start + (rows + 1) / 2)
        name = self.ops._prefill_plan.kernel
        yield from self._each(enqueue, f"T={rows} behind {start:,}", {(name, 0, 0): Cost(name, "FLOP", flops)})

    def selected_attention(self, union: int | None) -> Iterator[Line]:
        """A chunk over blocks of which TOGETHER neighbours choose so many, where neighbours go together."""
        config, arrays, rows = self.config, self.arrays, SELECTED_ROWS
        assert config.attention.sparse is not None
        rng = np.random.default_rng(0)
        blocks = planted_choices(
            SELECTED_START, rows, config.attention.num_kv_heads, config.attention.sparse, union, rng
        )
        self._set_rows(np.zeros(rows), np.arange(SELECTED_START, SELECTED_START + rows))
        self._set_chunk(SELECTED_START, rows)
        arrays["blocks"][:rows].set(blocks, stream=self.stream)
        of_rows = (arrays[name][:rows] for name in ("token_ids", "positions", "slots"))
        step = Rows(*of_rows, arrays["block_tables"], True)
        selection = Selection(arrays["blocks"][:rows], config.attention.sparse)

        def enqueue() -> None:
            for layer in range(2):
                pages = arrays["k_pages"][layer], arrays["v_pages"][layer]
                out, q = arrays["attention"][:rows], arrays["q"][:rows]
                self.ops.sparse.attend_chunk(out, q, *pages, step, config.attention.head_dim**-0.5, selection)

        name, chosen = "prefill_selected_wgmma", unions(blocks, TOGETHER).mean()
        flops = 4.0 * config.attention.q_size * rows * config.attention.sparse.num_selected * 64
        case = f"T={rows} behind {SELECTED_START:,}, {TOGETHER} choose {chosen:.0f}"
        yield from self._each(enqueue, case, {(name, 0, 0): Cost(name, "FLOP", flops)})

    def _each(self, enqueue: Callable[[], None], case: str, costs: dict[Label, Cost]) -> Iterator[Line]:
        """A line for each kernel of what `enqueue` launches, as far as its cost is known and it was asked for."""
        self.sieve.wanted = None
        self.sieve.counts.clear()
        enqueue()
        for label, count in list(self.sieve.counts.items()):
            if label not in costs or self._wanted not in costs[label].title:
                continue
            self.sieve.wanted = label
            us = median_us(self.stream, enqueue) / count
            title, unit, amount = costs[label]
            rate = amount / us * 1e6
            yield Line(self.shape, title, case, us, unit, rate, rate / self._ceilings[unit])

    def _fill(self) -> None:
        kernel = self.sieve.launcher.modules.kernel("load/fill.cu", "fill_normal", {})
        for name in ("x", "q", "attention", "inner", "normed", "qkv", "gate_up", "k_pages", "v_pages"):
            array = self.arrays[name]
            args = (np.uint64(array.data.ptr), np.int64(array.size), np.uint64(1), np.float32(0), np.float32(1))
            launch(self.stream, kernel, 1024, 256, 0, args)
        self.stream.synchronize()

    def _set_rows(self, slots: Any, positions: Any) -> None:
        with self.stream:
            self.arrays["slots"][: len(slots)].set(slots.astype(np.int32))
            self.arrays["positions"][: len(positions)].set(positions.astype(np.int32))
            self.arrays["token_ids"].fill(1)
        self._set_chunk(0)

    def _set_chunk(self, start: int, rows: int = CHUNK) -> None:
        with self.stream:
            self.arrays["chunk"].set(np.array([0, start, rows, 0], np.int32))
        self.stream.synchronize()


@contextmanager
def opened(
    shape: str,
    sequences: int,
    context: int,
    ceilings: dict[str, float],
    wanted: str,
    *,
    is_packed: bool = False,
    sparse: SparseSetting = "off",
) -> Iterator[Bench]:
    """The shape with a few or with many layers, on random weights; twice as many layers of 4 bits."""
    overrides: dict[str, Any] = {"num_hidden_layers": LAYERS[shape]}
    if is_packed:
        overrides = {"num_hidden_layers": 2 * LAYERS[shape], "quantization_config": PACKED}
    with shape_folder(shape) as folder, LLM(
        folder, executor="cuda", load_format="dummy", hf_overrides=overrides, max_context=context,
        max_sequences=sequences, prefill_chunk=CHUNK if sequences == 1 else 64, sparse=sparse,
    ) as llm:  # fmt: skip
        yield Bench(shape, llm, ceilings, wanted)


def lines_of(shape: str, ceilings: dict[str, float], wanted: str, row_counts: list[int]) -> Iterator[Line]:
    """Every measurement of a shape."""
    with opened(shape, SEQUENCES, SHORT, ceilings, wanted, is_packed=True) as bench:
        yield from bench.packed(sorted({*row_counts, 16, 32}))
    with opened(shape, SEQUENCES, SHORT, ceilings, wanted) as bench:
        yield from bench.decode(row_counts)
        for rows, keys in DECODE_KEYS:
            if keys <= SHORT:
                yield from bench.decode_attention(rows, keys)
    with opened(shape, 1, LONG, ceilings, wanted) as bench:
        for rows, keys in DECODE_KEYS:
            if keys > SHORT:
                yield from bench.decode_attention(rows, keys)
        yield from bench.prefill()
        for start in PREFILL_STARTS:
            yield from bench.prefill_attention(start)
    with opened(shape, 1, LONG, ceilings, wanted, sparse={}) as bench:
        for union in SELECTED_UNIONS:
            yield from bench.selected_attention(union)


def main(arguments: list[str]) -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=LAYERS, help="may be repeated (default: both)")
    parser.add_argument("--kernel", default="", help="only kernels with this in their name")
    parser.add_argument("--rows", default="1,8,64", help="rows of a decode step, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="put the table into kernels_cu/README.md")
    options = parser.parse_args(arguments)
    device = open_device()
    ceilings = {"byte": read_bandwidth(device), "FLOP": product_ceiling(device)}
    lines = []
    for shape in options.shape or LAYERS:
        for line in lines_of(shape, ceilings, options.kernel, [int(rows) for rows in options.rows.split(",")]):
            print(line, flush=True)
            lines.append(line)
    if options.json:
        record = {"device": device.name, "ceilings": ceilings, "lines": [asdict(line) for line in lines]}
        options.json.write_text(json.dumps(record, indent=1))
    if options.write:
        table = markdown(lines, f"{device.name}, {date.today()}", ceilings)
        README.write_text(replaced(README.read_text(encoding="utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CpmrtError as error:
        sys.exit(f"tools/bench_kernels.py: {error}")
