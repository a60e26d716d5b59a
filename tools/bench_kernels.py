"""Time each hot kernel alone, as the model launches it: python3 tools/bench_kernels.py [--kernel NAME] [--write].

A number is the median over replays of a CUDA graph with the launches of one kernel in a pass over the model's layers,
divided by their count: its operands, sizes and dependent-launch edges are the model's own. There are so many layers
that the L2 holds nothing of the pass before: weights stream from memory. What a pass leaves in the L2 in earnest (the
activations) is found there here too. Shares are of the read bandwidth and of the fastest large product that are
measured first. The steps' bookkeeping kernels are not here: they take commands, which only the executor writes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np  # noqa: E402
from kernel_costs import Cost, Label, chunk_costs, packed_costs, product_costs, skinny_costs  # noqa: E402
from kernel_table import Line, markdown, replaced  # noqa: E402
from planted_choices import TOGETHER, planted_choices  # noqa: E402
from sparse_evaluation.neighbours import unions  # noqa: E402

from cpmrt.bench.shapes import gptq_config, shape_config, ternary_config  # noqa: E402
from cpmrt.config import EngineConfig, ModelConfig, SparseSetting  # noqa: E402
from cpmrt.config.sparse import with_sparse_setting  # noqa: E402
from cpmrt.cuda.arena import held_arrays  # noqa: E402
from cpmrt.cuda.bandwidth import read_bandwidth  # noqa: E402
from cpmrt.cuda.build.launcher import Launcher  # noqa: E402
from cpmrt.cuda.build.modules import Modules  # noqa: E402
from cpmrt.cuda.build.spec import KernelSpec, macros_of  # noqa: E402
from cpmrt.cuda.load.random import FILL_NORMAL  # noqa: E402
from cpmrt.cuda.ops.gemm import GEMM, Gemm  # noqa: E402
from cpmrt.cuda.step.forward import StepForward  # noqa: E402
from cpmrt.cuda.step.kernels import StepKernels  # noqa: E402
from cpmrt.cuda.step.memory import cuda_needs  # noqa: E402
from cpmrt.dtypes import DType, from_float32  # noqa: E402
from cpmrt.errors import CpmrtError  # noqa: E402
from cpmrt.models import decoder  # noqa: E402
from cpmrt.models.planning import plan_model, weight_specs  # noqa: E402
from cpmrt.ops import KVPages, Rows, Selection  # noqa: E402

if TYPE_CHECKING:
    from kernel_timing import Gpu

README = ROOT / "kernels_cu" / "README.md"
# Number of layers of each shape: enough that the weights of one kind in all layers exceed any L2.
LAYERS = {"minicpm4-8b": 8, "minicpm4-0.5b": 64}
SEQUENCES, SHORT, LONG, CHUNK = 64, 2048, 131072, 4096
DECODE_KEYS = ((1, 1088), (8, 1088), (64, 1088), (1, 4096), (1, 32768), (1, 131072))
PREFILL_STARTS = (0, 28672, 122880)
SELECTED_START, SELECTED_ROWS = 126976, 2048
# Number of blocks that 12 neighbouring rows choose together: as random choices have it (None), and as a trained model
# has it (tools/sparse_evaluation).
SELECTED_UNIONS = (None, 226)
COLD_BYTES = 400 << 20
MOST_LAUNCHES = 256
_RANDOM = ("x", "q", "attention", "inner", "normed", "qkv", "gate_up", "k_pages", "v_pages")


class Sieve(Launcher):
    """A launcher that launches only the kernel with the wanted label, and counts the launches of every label."""

    def __init__(self, stream: Any, modules: Modules):
        super().__init__(stream, modules, use_pdl=True)
        self.wanted: Label | None = None
        self.counts: Counter[Label] = Counter()

    def passes(self, label: Label) -> bool:
        """Count a launch with this label; return whether it is the wanted one, which is to be launched."""
        self.counts[label] += 1
        return label == self.wanted

    def __call__(self, spec: KernelSpec, constants: Any, grid: Any, block: int, *args: Any, **options: Any) -> None:
        depth = macros_of(constants).get("IN_FEATURES", 0)
        if spec is GEMM or self.passes((spec.name, 0, depth)):  # SievedGemm has filtered products already
            super().__call__(spec, constants, grid, block, *args, **options)


class SievedGemm(Gemm):
    """The products of a chunk, filtered by a sieve; their labels begin with `name`."""

    def __init__(self, name: str, sieve: Sieve, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._name, self._sieve = name, sieve

    def __call__(self, y: Any, x: Any, w: Any, **options: Any) -> None:
        if self._sieve.passes((self._name, *w.shape)):
            super().__call__(y, x, w, **options)


class Bench:
    """Times the kernels of one shape with random weights, one by one.

    `ceilings` are the most bytes and operations a second (keys "byte", "FLOP"); only kernels with `wanted` in their
    title are timed.
    """

    def __init__(
        self, gpu: Gpu, shape: str, config: ModelConfig, settings: EngineConfig, ceilings: dict[str, float], wanted: str
    ):
        self.shape, self.config, self._gpu, self._ceilings, self._wanted = shape, config, gpu, ceilings, wanted
        modules, context = Modules(gpu.device.arch, DType.BFLOAT16), settings.max_context or 0
        self.sieve, everything = Sieve(gpu.stream, modules), Launcher(gpu.stream, modules, use_pdl=True)
        specs = weight_specs(config, settings)
        needs = cuda_needs(config, settings, specs, gpu.device)
        plan = plan_model(config, settings, itemsize=2, max_context=context, needs=needs, specs=specs)
        arena = gpu.arena(plan)
        self.arrays, self.caches = held_arrays(arena, gpu.device), plan.caches
        for name in ("packed_counter", "packed_sums"):  # without them each product of a layer is a launch of its own
            self.arrays.pop(name, None)
        gpu.randomise(everything, arena, specs)
        for array in map(self.arrays.get, _RANDOM):
            distribution = np.int64(array.size), np.uint64(1), np.float32(0), np.float32(1)
            everything(FILL_NORMAL, {}, 1024, 256, array, *distribution)
        gpu.put(self.arrays["block_tables"], np.array(plan.caches.block_tables()))
        stored = partial(from_float32, dtype=DType.BFLOAT16)
        for table in decoder.tables(config, context, context):
            for part, values in table.parts(self.arrays[table.spec.name], stored):
                gpu.put(part, values)
        self._rings = gpu.rings(context, config.vocab_size)
        self.steps = StepKernels(self.sieve, config, self.arrays, self._rings, gpu.device)
        self.library, self.own = self._forward("cuBLASLt", gpu.has_library), self._forward("gemm", False)

    def _forward(self, name: str, use_library: bool) -> StepForward:
        device, workspace = self._gpu.device, self.arrays["gemm_workspace"]
        gemm = SievedGemm(name, self.sieve, device, self.sieve, workspace, use_library=use_library)
        return StepForward(self.config, device, self.sieve, gemm, self.arrays, self.caches)

    def decode(self, row_counts: Iterable[int]) -> Iterator[Line]:
        """Time the products and the sampler of a decode step."""
        costs = skinny_costs(self.config)
        for rows in row_counts:
            self._set_rows(np.arange(rows), np.full(rows, SHORT - 1))
            yield from self._each(partial(self.library.decode, rows), f"T={rows}", costs)
            sampled = {("sample", 0, 0): Cost("sample", "byte", 4.0 * rows * self.config.vocab_size)}
            yield from self._each(partial(self.steps.sample, rows), f"T={rows}", sampled)

    def packed(self, row_counts: Iterable[int]) -> Iterator[Line]:
        """Time the products of a decode step with 4-bit or ternary weights."""
        assert self.config.quantization is not None
        suffix = ", ternary" if self.config.quantization.bits == 2 else ""
        for rows in row_counts:
            self._set_rows(np.arange(rows), np.full(rows, SHORT - 1))
            costs = packed_costs(self.config, rows)
            yield from self._each(partial(self.library.decode, rows), f"T={rows}{suffix}", costs)

    def prefill(self) -> Iterator[Line]:
        """Time everything in a chunk except attention; the products both by the library and by our own kernel."""
        self._set_rows(np.zeros(CHUNK), np.arange(CHUNK))
        case = f"T={CHUNK}"
        library = product_costs(self.config, CHUNK, "cuBLASLt") | chunk_costs(self.config, CHUNK)
        yield from self._each(partial(self.library.chunk, CHUNK), case, library)
        yield from self._each(partial(self.own.chunk, CHUNK), case, product_costs(self.config, CHUNK, "gemm"))

    def decode_attention(self, rows: int, keys: int) -> Iterator[Line]:
        """Time attention of a decode step, taking layers and slots in turn, so that no key is in the L2."""
        num_slots = len(self.arrays["block_tables"])
        self._set_rows(np.arange(num_slots), np.full(num_slots, keys - 1))
        num_bytes = 4.0 * rows * keys * self.config.attention.kv_size
        turns = [
            (layer, slice(first, first + rows))
            for first in range(0, num_slots - rows + 1, rows)
            for layer in range(self.config.num_layers)
        ][: min(MOST_LAUNCHES, int(COLD_BYTES // num_bytes) + 1)]

        def enqueue() -> None:
            for layer, slots in turns:
                step, (out, q, kv, scale) = self._rows(rows, False, slots), self._operands(rows, layer)
                self.library.ops.decode_attention(out, q, kv, step, scale)

        cost = {("decode_attention", 0, 0): Cost("decode_attention", "byte", num_bytes)}
        yield from self._each(enqueue, f"T={rows}, {keys:,} keys", cost)

    def prefill_attention(self, start: int) -> Iterator[Line]:
        """Time the attention of a chunk that follows `start` keys."""
        self._set_chunk(start, CHUNK)
        flops = 4.0 * self.config.attention.q_size * CHUNK * (start + (CHUNK + 1) / 2)
        names = ("prefill_attention", "prefill_attention_wgmma")  # the device has one of the two
        costs = {(name, 0, 0): Cost(name, "FLOP", flops) for name in names}
        yield from self._each(partial(self._attend_chunk, CHUNK, None), f"T={CHUNK} behind {start:,}", costs)

    def selected_attention(self, union: int | None) -> Iterator[Line]:
        """Time the attention of a chunk over chosen blocks, by the kernel that takes neighbouring rows together.

        TOGETHER neighbouring rows choose `union` blocks in all.
        """
        attention, rows, rng = self.config.attention, SELECTED_ROWS, np.random.default_rng(0)
        assert attention.sparse is not None
        blocks = planted_choices(SELECTED_START, rows, attention.num_kv_heads, attention.sparse, union, rng)
        self._set_rows(np.zeros(rows), np.arange(SELECTED_START, SELECTED_START + rows))
        self._set_chunk(SELECTED_START, rows)
        self._gpu.put(self.arrays["blocks"], blocks)
        selection = Selection(self.arrays["blocks"][:rows], attention.sparse)
        name, chosen = "prefill_selected_wgmma", unions(blocks, TOGETHER).mean()
        flops = 4.0 * attention.q_size * rows * attention.sparse.num_selected * 64
        case = f"T={rows} behind {SELECTED_START:,}, {TOGETHER} choose {chosen:.0f}"
        costs = {(name, 0, 0): Cost(name, "FLOP", flops)}
        yield from self._each(partial(self._attend_chunk, rows, selection), case, costs)

    def _attend_chunk(self, rows: int, selection: Selection | None) -> None:
        for layer in range(2):
            out, q, kv, scale = self._operands(rows, layer)
            self.library.ops.prefill_attention(out, q, kv, self._rows(rows, True), scale, selection=selection)

    def _rows(self, count: int, is_prefill: bool, slots: slice | None = None) -> Rows:
        tokens, positions = (self.arrays[name][:count] for name in ("token_ids", "positions"))
        of_slots = self.arrays["slots"][slots or slice(count)]
        return Rows(tokens, positions, of_slots, self.arrays["block_tables"], is_prefill)

    def _operands(self, rows: int, layer: int) -> tuple[Any, Any, KVPages, float]:
        """Return the operands of attention in a layer: output, queries, KV pages and softmax scale."""
        pages = self.caches.of_layer(layer, self.arrays)
        kv = KVPages(pages["k_pages"], pages["v_pages"])
        return self.arrays["attention"][:rows], self.arrays["q"][:rows], kv, self.config.attention.head_dim**-0.5

    def _each(self, enqueue: Callable[[], None], case: str, costs: dict[Label, Cost]) -> Iterator[Line]:
        """Yield a line for each kernel that `enqueue` launches, if its cost is known and its title was asked for."""
        self.sieve.wanted = None
        self.sieve.counts.clear()
        enqueue()
        for label, count in list(self.sieve.counts.items()):
            if label not in costs or self._wanted not in costs[label].title:
                continue
            self.sieve.wanted = label
            us = self._gpu.microseconds(enqueue) / count
            title, unit, amount = costs[label]
            rate = amount / us * 1e6
            yield Line(self.shape, title, case, us, unit, rate, rate / self._ceilings[unit])

    def _set_rows(self, slots: Any, positions: Any) -> None:
        for name, values in (("slots", slots), ("positions", positions), ("token_ids", 1)):
            self._gpu.put(self.arrays[name], values)
        self._set_chunk(0, CHUNK)

    def _set_chunk(self, start: int, rows: int) -> None:
        self._gpu.put(self.arrays["chunk"], np.array([0, start, rows, 0]))


def lines_of(
    gpu: Gpu, shape: str, ceilings: dict[str, float], wanted: str, row_counts: Iterable[int]
) -> Iterator[Line]:
    """Yield every measurement of a shape. Models with packed weights have twice as many layers."""

    def bench(sequences: int, context: int, sparse: SparseSetting = "off", **overrides: Any) -> Bench:
        gc.collect()  # frees the arena of the bench before
        config_json = shape_config(shape) | {"num_hidden_layers": LAYERS[shape]} | overrides
        config = ModelConfig.from_hf(with_sparse_setting(config_json, sparse))
        chunk = CHUNK if sequences == 1 else 64
        settings = EngineConfig(max_context=context, max_sequences=sequences, prefill_chunk=chunk)
        return Bench(gpu, shape, config.for_context(context), settings, ceilings, wanted)

    for quantization in (gptq_config(), ternary_config()):
        packed = {"num_hidden_layers": 2 * LAYERS[shape], "quantization_config": quantization}
        yield from bench(SEQUENCES, SHORT, **packed).packed(sorted({*row_counts, 16, 32}))
    of_many = bench(SEQUENCES, SHORT)
    yield from of_many.decode(row_counts)
    for rows, keys in DECODE_KEYS:
        if keys <= SHORT:
            yield from of_many.decode_attention(rows, keys)
    del of_many
    of_one = bench(1, LONG)
    for rows, keys in DECODE_KEYS:
        if keys > SHORT:
            yield from of_one.decode_attention(rows, keys)
    yield from of_one.prefill()
    for start in PREFILL_STARTS:
        yield from of_one.prefill_attention(start)
    del of_one
    of_sparse = bench(1, LONG, sparse={})
    for union in SELECTED_UNIONS:
        yield from of_sparse.selected_attention(union)


def main(arguments: list[str]) -> int:
    """Measure and print. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=LAYERS, help="may be repeated (default: both)")
    parser.add_argument("--kernel", default="", help="only kernels with this in their name")
    parser.add_argument("--rows", default="1,8,64", help="rows of a decode step, separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="put the table into kernels_cu/README.md")
    options = parser.parse_args(arguments)
    from kernel_timing import Gpu

    gpu, lines = Gpu(), list[Line]()
    ceilings = {"byte": read_bandwidth(gpu.device), "FLOP": gpu.product_ceiling()}
    for shape in options.shape or LAYERS:
        for line in lines_of(gpu, shape, ceilings, options.kernel, [int(rows) for rows in options.rows.split(",")]):
            print(line, flush=True)
            lines.append(line)
    if options.json:
        record = {"device": gpu.device.name, "ceilings": ceilings, "lines": [asdict(line) for line in lines]}
        options.json.write_text(json.dumps(record, indent=1))
    if options.write:
        table = markdown(lines, f"{gpu.device.name}, {date.today()}", ceilings)
        README.write_text(replaced(README.read_text(encoding="utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except CpmrtError as error:
        sys.exit(f"tools/bench_kernels.py: {error}")
