"""Rows of decode_attention with their pages, its launch, and the NumPy op's result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cpmrt.cuda.ops.attention.plan import DecodeAttentionPlan, decode_launch, plan_decode_attention
from cpmrt.dtypes import DType, round_to
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import OPS, Fp8Pages, KVPages, Rows
from cpmrt.reference.fp8_pages import e4m3_codes
from cpmrt.reference.ops import NumpyOps

GUARD = 256


@dataclass
class Case:
    """Rows that each attend to `lengths[t]` keys of a slot of their own; unwritten cache is NaN."""

    dtype: DType
    num_heads: int
    head_dim: int
    q: Any
    k_pages: Any
    v_pages: Any
    positions: Any
    slots: Any
    block_tables: Any
    tree_masks: Any | None = None
    tree_base: Any | None = None

    @property
    def num_kv_heads(self) -> int:
        return int(self.k_pages.shape[1])

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def row(self, index: int) -> Case:
        return self.take([index])

    def take(self, rows: list[int]) -> Case:
        """Some of the rows, on the same pages."""
        tree = {"tree_masks": self.tree_masks, "tree_base": self.tree_base}
        taken = {name: None if values is None else values[rows] for name, values in tree.items()}
        return replace(self, q=self.q[rows], positions=self.positions[rows], slots=self.slots[rows], **taken)


def make_case(dtype: DType, group: int, kv_heads: int, head_dim: int, lengths: list[int], spread: float = 1.0) -> Case:
    rng = np.random.default_rng(group * 1000 + head_dim)
    used_pages = [-(-length // PAGE_SIZE) for length in lengths]
    num_pages = sum(used_pages) + 3
    order = rng.permutation(num_pages).astype(np.int32)
    block_tables = np.full((len(lengths), max(used_pages) + 1), order[-1])
    for slot, end in enumerate(np.cumsum(used_pages)):
        block_tables[slot, : used_pages[slot]] = order[end - used_pages[slot] : end]
    pages = np.full((2, num_pages, kv_heads, PAGE_SIZE, head_dim), np.nan, np.float32)
    for slot, length in enumerate(lengths):
        for page in range(used_pages[slot]):
            used = min(PAGE_SIZE, length - page * PAGE_SIZE)
            values = rng.standard_normal((2, kv_heads, used, head_dim), np.float32)
            pages[:, block_tables[slot, page], :, :used] = round_to(values, dtype)
    q = rng.standard_normal((len(lengths), group * kv_heads * head_dim), np.float32) * np.float32(spread)
    return Case(
        dtype, group * kv_heads, head_dim, round_to(q, dtype), pages[0], pages[1],
        np.array(lengths, np.int32) - 1, np.arange(len(lengths), dtype=np.int32), block_tables,
    )  # fmt: skip


def fp8_of(pages: Any, seed: int) -> Fp8Pages:
    """Scales of all sizes for keys and values of about 1, NaN where nothing was written."""
    random = np.random.default_rng(seed)
    scales = 2.0 ** random.integers(-7, 4, pages.shape[:2]).astype(np.float32)
    unwritten = np.isnan(pages)
    codes = e4m3_codes(np.where(unwritten, 0, pages) / scales[..., None, None])
    return Fp8Pages(np.where(unwritten, np.uint8(0x7F), codes), scales)


class Launcher:
    """Uploads a case's pages once; `run` gives the output rows and checks the guards and the counters."""

    def __init__(self, cuda: Any, case: Case, *, portable: bool = False, max_context: int = 8192, sms: int = 132):
        self.cuda, self.case = cuda, case
        self.plan = plan_for(case, int(cuda.arch.removeprefix("sm_")), max_context, sms, portable)
        self.k_pages, self.v_pages = cuda.array(case.k_pages, case.dtype), cuda.array(case.v_pages, case.dtype)
        self.block_tables = cuda.array(case.block_tables)
        self.partials = cuda.array(np.full(self.plan.partials, np.nan, np.float32))
        self.arrivals = cuda.array(np.zeros(self.plan.arrivals, np.int32))

    def run(self, case: Case, *, pdl: bool = False, window: int = 0, launches: int = 1) -> np.ndarray[Any, Any]:
        size = case.q.size
        out = self.cuda.array(np.full(size + 2 * GUARD, np.nan, np.float32), case.dtype)
        inputs = [self.cuda.array(case.q, case.dtype), self.k_pages, self.v_pages]
        rows = [self.cuda.array(case.positions), self.cuda.array(case.slots), self.block_tables]
        tree = [None if values is None else self.cuda.array(values) for values in (case.tree_masks, case.tree_base)]
        sizes = [np.int32(case.num_kv_heads), np.int32(case.block_tables.shape[1])]
        operands = [out[GUARD:], self.partials, self.arrivals, *inputs, *rows, *tree]
        for _ in range(launches):
            launch_attention(self.cuda, self.plan, case.dtype, operands, sizes, case.scale, window=window, pdl=pdl)
        result = self.cuda.numpy(out, case.dtype)
        assert np.isnan(result[:GUARD]).all() and np.isnan(result[GUARD + size :]).all(), "wrote outside out"
        assert not self.cuda.numpy(self.arrivals).any(), "counters were not reset"
        return result[GUARD : GUARD + size].reshape(case.q.shape)


def launch_attention(
    cuda: Any,
    plan: DecodeAttentionPlan,
    dtype: DType,
    operands: list[Any],
    sizes: list[Any],
    scale: float,
    *,
    window: int = 0,
    pdl: bool = False,
    scales: list[Any] | None = None,
) -> None:
    """As `CudaOps` does. `operands`: up to tree_base, None for plain rows; `sizes`: KV heads, pages of a sequence;
    `scales` of pages in fp8."""
    slots, tree_base = operands[7], operands[10]
    one = decode_launch(plan, len(slots), is_tree=tree_base is not None, window=window)
    kernel = cuda.kernel(one.kernel.name, dtype, **one.constants)
    numbers = [*map(np.int32, one.sizes), *sizes, np.float32(scale)]
    kernel(one.grid, one.threads, *operands, *numbers, *(scales or []), smem=one.shared_bytes, pdl=pdl)


def plan_for(case: Case, arch: int, max_context: int, sms: int, portable: bool) -> DecodeAttentionPlan:
    return plan_decode_attention(
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, max_context=max_context,
        max_rows=64, arch=arch, num_sms=sms, portable=portable,
    )  # fmt: skip


def oracle(case: Case, window: int = 0) -> np.ndarray[Any, Any]:
    out = np.empty_like(case.q)
    tree = {"tree_masks": case.tree_masks, "tree_base": case.tree_base}
    rows = Rows(np.zeros(len(out), np.int32), case.positions, case.slots, case.block_tables, False, **tree)
    NumpyOps(case.dtype).decode_attention(out, case.q, KVPages(case.k_pages, case.v_pages), rows, case.scale, window)
    return out


def assert_close(actual: Any, expected: Any, dtype: DType) -> None:
    assert np.isfinite(actual).all()
    errors = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() <= OPS["decode_attention"].tolerance[dtype], f"row {errors.argmax()}: {errors.max():.2e}"
