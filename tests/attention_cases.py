"""Rows of a step with their pages, the op decode_attention on them, and the NumPy op's result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cpmrt.config.engine import FP8
from cpmrt.config.layers import GroupedAttention
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.attention.attention import AttentionOps, AttentionPlan
from cpmrt.dtypes import DType, round_to
from cpmrt.executor import MAX_ROWS
from cpmrt.memory.caches import PAGE_SIZE, CacheLayout
from cpmrt.models.mixers.grouped import caches
from cpmrt.ops import ANY_ROWS, OPS, Fp8Pages, KVPages, RowKind, Rows
from cpmrt.reference.fp8_pages import e4m3_codes
from cpmrt.reference.ops import NumpyOps
from cpmrt.tensor_spec import BufferSpec

GUARD = 256


@dataclass
class Case:
    """Rows of a step with the pages that they attend to; entries of pages that nothing was written to are NaN."""

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
        """Return the case with only the rows `rows`, on the same pages."""
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
    """Return `pages` in fp8, with random scales from 2^-7 to 2^3 for each page and head; unwritten entries stay NaN."""
    random = np.random.default_rng(seed)
    scales = 2.0 ** random.integers(-7, 4, pages.shape[:2]).astype(np.float32)
    unwritten = np.isnan(pages)
    codes = e4m3_codes(np.where(unwritten, 0, pages) / scales[..., None, None])
    return Fp8Pages(np.where(unwritten, np.uint8(0x7F), codes), scales)


def planned_device(cuda: Any, *, sms: int = 132, portable: bool = False, capability: int | None = None) -> Device:
    """Return the device with this many multiprocessors and this compute capability; `portable`: without clusters."""
    return replace(cuda.device, num_sms=sms, capability=capability or (80 if portable else cuda.device.capability))


def plan_of(
    attention: GroupedAttention, device: Device, max_context: int, max_rows: int = MAX_ROWS, *, is_fp8: bool = False
) -> AttentionPlan:
    """Return the attention plan of a model whose only layer has this attention."""
    layers = (caches(attention, FP8 if is_fp8 else "auto"),)
    return AttentionPlan.of(attention, device, CacheLayout(layers, max_context, max_sequences=1), max_rows)


def workspace(cuda: Any, plan: AttentionPlan) -> dict[str, Any]:
    """Return the buffers that the plan needs in the arena: the arrival counters are 0, everything else is poison."""
    specs = (*plan.tables, *plan.workspace, BufferSpec("chunk", (4,), 0, 0, np.int32))
    arrays = {
        spec.name: np.full(spec.shape, np.nan if spec.dtype is np.float32 else 0x77, spec.dtype or np.uint16)
        for spec in specs
    }
    arrays["attention_arrivals"][:] = 0
    return {name: cuda.array(values) for name, values in arrays.items()}


def uploaded(cuda: Any, pages: Fp8Pages) -> Fp8Pages:
    """Return `pages` on the device, with the codes and scales of tree nodes if there are any."""
    parts = pages.codes, pages.scales, pages.nodes, pages.node_scales
    return Fp8Pages(*(None if part is None else cuda.array(part) for part in parts))


class AttentionDevice:
    """A case's pages, or `pages` in fp8, on the device; `run` returns output rows and checks guards and counters."""

    def __init__(
        self,
        cuda: Any,
        case: Case,
        *,
        pages: tuple[Fp8Pages, Fp8Pages] | None = None,
        portable: bool = False,
        capability: int | None = None,
        max_context: int = 8192,
        sms: int = 132,
    ):
        self.cuda = cuda
        heads = GroupedAttention(case.num_heads, case.num_kv_heads, case.head_dim)
        device = planned_device(cuda, sms=sms, portable=portable, capability=capability)
        if isinstance(case.k_pages, Fp8Pages):
            pages = case.k_pages, case.v_pages
        self.plan = plan_of(heads, device, max_context, is_fp8=pages is not None)
        self.arrays, self.block_tables = workspace(cuda, self.plan), cuda.array(case.block_tables)
        if pages is None:
            self.kv = KVPages(*(cuda.array(values, case.dtype) for values in (case.k_pages, case.v_pages)))
        else:
            self.kv = KVPages(*(uploaded(cuda, part) for part in pages))

    def attention(
        self, out: Any, case: Case, *, pdl: bool = False, window: int = 0, kind: RowKind = ANY_ROWS
    ) -> Callable[[], None]:
        """Upload the rows of `case` and return a function that launches the op on them; `out` is on the device."""
        places = (case.positions, case.slots, case.tree_masks, case.tree_base)
        positions, slots, *tree = (None if values is None else self.cuda.array(values) for values in places)
        rows = Rows(None, positions, slots, self.block_tables, False, None, *tree, kind=kind)
        ops = AttentionOps(self.cuda.launcher(case.dtype, pdl=pdl), self.plan, self.arrays)
        return partial(
            ops.decode_attention, out, self.cuda.array(case.q, case.dtype), self.kv, rows, case.scale, window
        )  # fmt: skip

    def run(self, case: Case, *, launches: int = 1, **options: Any) -> np.ndarray[Any, Any]:
        """Return the op's output rows after so many launches, with the `options` of `attention`."""
        size = case.q.size
        out = self.cuda.array(np.full(size + 2 * GUARD, np.nan, np.float32), case.dtype)
        inner = out[GUARD : GUARD + size].reshape(case.q.shape)
        attend = self.attention(inner, case, **options)
        for _ in range(launches):
            attend()
        result = self.cuda.numpy(out, case.dtype)
        assert np.isnan(result[:GUARD]).all() and np.isnan(result[GUARD + size :]).all(), "wrote outside out"
        assert not self.cuda.numpy(self.arrays["attention_arrivals"]).any(), "counters were not reset"
        return result[GUARD : GUARD + size].reshape(case.q.shape)


def oracle(case: Case, window: int = 0) -> np.ndarray[Any, Any]:
    out = np.empty_like(case.q)
    tree = {"tree_masks": case.tree_masks, "tree_base": case.tree_base}
    rows = Rows(np.zeros(len(out), np.int32), case.positions, case.slots, case.block_tables, False, **tree)
    NumpyOps(case.dtype).decode_attention(out, case.q, KVPages(case.k_pages, case.v_pages), rows, case.scale, window)
    return out


def assert_close(actual: Any, expected: Any, dtype: DType, op: str = "decode_attention") -> None:
    assert np.isfinite(actual).all()
    errors = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() <= OPS[op].tolerance[dtype], f"row {errors.argmax()}: {errors.max():.2e}"
