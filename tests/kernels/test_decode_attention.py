"""decode_attention against the NumPy op: lengths around pages, groups, head sizes, masks, bitwise row invariance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cpmrt.cuda.attention_plan import DecodeAttentionPlan, plan_decode_attention
from cpmrt.dtypes import DType, round_to
from cpmrt.memory.kv_pages import PAGE_SIZE
from cpmrt.ops import OPS, Rows
from cpmrt.reference.ops import NumpyOps, softmax

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 300, 1000, 2048, 2049, 5000]
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

    @property
    def num_kv_heads(self) -> int:
        return int(self.k_pages.shape[1])

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def row(self, index: int) -> Case:
        at = slice(index, index + 1)
        return replace(self, q=self.q[at], positions=self.positions[at], slots=self.slots[at])

    def take(self, rows: list[int]) -> Case:
        return replace(self, q=self.q[rows], positions=self.positions[rows], slots=self.slots[rows])


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


class Launcher:
    """Uploads a case's pages once; `run` gives the output rows and checks the guards and the counters."""

    def __init__(self, cuda: Any, case: Case, *, portable: bool = False, max_context: int = 8192, sms: int = 132):
        self.cuda, self.case = cuda, case
        self.plan = plan_for(case, int(cuda.arch.removeprefix("sm_")), max_context, sms, portable)
        self.kernel = cuda.kernel("decode_attention.cu", "decode_attention", case.dtype, **self.plan.constants)
        self.k_pages, self.v_pages = cuda.array(case.k_pages, case.dtype), cuda.array(case.v_pages, case.dtype)
        self.block_tables = cuda.array(case.block_tables)
        self.partials = cuda.array(np.full(self.plan.partials, np.nan, np.float32))
        self.arrivals = cuda.array(np.zeros(self.plan.arrivals, np.int32))

    def run(
        self, case: Case, *, pdl: bool = False, tree_masks: Any = None, tree_base: Any = None, launches: int = 1
    ) -> np.ndarray[Any, Any]:
        size = case.q.size
        out = self.cuda.array(np.full(size + 2 * GUARD, np.nan, np.float32), case.dtype)
        inputs = [self.cuda.array(case.q, case.dtype), self.k_pages, self.v_pages]
        rows = [self.cuda.array(case.positions), self.cuda.array(case.slots), self.block_tables]
        tree = [None if values is None else self.cuda.array(values) for values in (tree_masks, tree_base)]
        sizes = [np.int32(self.plan.num_splits), np.int32(case.num_kv_heads), np.int32(case.block_tables.shape[1])]
        arguments = [out[GUARD:], self.partials, self.arrivals, *inputs, *rows, *tree, *sizes, np.float32(case.scale)]
        grid = self.plan.grid(len(case.q))
        for _ in range(launches):
            self.kernel(grid, self.plan.threads, *arguments, smem=self.plan.shared_bytes, pdl=pdl)
        result = self.cuda.numpy(out, case.dtype)
        assert np.isnan(result[:GUARD]).all() and np.isnan(result[GUARD + size :]).all(), "wrote outside out"
        assert not self.cuda.numpy(self.arrivals).any(), "counters were not reset"
        return result[GUARD : GUARD + size].reshape(case.q.shape)


def plan_for(case: Case, arch: int, max_context: int, sms: int, portable: bool) -> DecodeAttentionPlan:
    return plan_decode_attention(
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, max_context=max_context,
        max_rows=64, arch=arch, num_sms=sms, portable=portable,
    )  # fmt: skip


def oracle(case: Case) -> np.ndarray[Any, Any]:
    out = np.empty_like(case.q)
    rows = Rows(np.zeros(len(out), np.int32), case.positions, case.slots, case.block_tables, False)
    NumpyOps(case.dtype).decode_attention(out, case.q, case.k_pages, case.v_pages, rows, case.scale)
    return out


def assert_close(actual: Any, expected: Any, dtype: DType) -> None:
    assert np.isfinite(actual).all()
    errors = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() <= OPS["decode_attention"].tolerance[dtype], f"row {errors.argmax()}: {errors.max():.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (2, 2), (4, 1), (5, 1), (8, 2), (16, 2), (17, 1), (20, 2)])
def test_matches_the_numpy_op(cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int) -> None:
    case = make_case(dtype, group, kv_heads, head_dim, LENGTHS)
    assert_close(Launcher(cuda, case).run(case), oracle(case), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "head_dim"), [(16, 128), (5, 96), (1, 64), (20, 128)])
def test_without_clusters(cuda: Any, dtype: DType, group: int, head_dim: int) -> None:
    case = make_case(dtype, group, 2, head_dim, LENGTHS)
    assert_close(Launcher(cuda, case, portable=True).run(case), oracle(case), dtype)


@pytest.mark.parametrize("sms", [8, 40, 264])
def test_any_number_of_splits(cuda: Any, sms: int) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, 128, [1, 700, 20000])
    assert_close(Launcher(cuda, case, max_context=32768, sms=sms).run(case), oracle(case), case.dtype)


@pytest.mark.parametrize("portable", [False, True])
def test_a_row_does_not_depend_on_the_others(cuda: Any, portable: bool) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, 128, [*LENGTHS, 3000])
    launcher = Launcher(cuda, case, portable=portable)
    alone = np.concatenate([launcher.run(case.row(i)) for i in range(len(case.q))])
    for num_rows in (2, 5, 8, 12, 16, 31, 32, 64):
        rows = [(7 * i + num_rows) % len(case.q) for i in range(num_rows)]
        assert np.array_equal(launcher.run(case.take(rows), pdl=num_rows % 2 == 0), alone[rows]), num_rows


def test_repeated_and_dependent_launches_give_the_same_bits(cuda: Any) -> None:
    case = make_case(DType.FLOAT16, 8, 2, 64, LENGTHS)
    launcher = Launcher(cuda, case)
    once = launcher.run(case)
    assert np.array_equal(launcher.run(case, launches=20), once)
    assert np.array_equal(launcher.run(case, launches=20, pdl=True), once)


def test_padding_rows_become_zeros(cuda: Any) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, 128, [100, 5000, 64, 1])
    launcher, expected = Launcher(cuda, case), oracle(case)
    case.slots[1], case.positions[1], case.slots[3] = -1, 10**9, -1
    out = launcher.run(case)
    assert not out[[1, 3]].any()
    assert_close(out[[0, 2]], expected[[0, 2]], case.dtype)


def test_slots_may_share_pages(cuda: Any) -> None:
    case = make_case(DType.BFLOAT16, 4, 2, 96, [1000, 1000, 900])
    case.block_tables[1:, :10] = case.block_tables[0, :10]
    assert_close(Launcher(cuda, case).run(case), oracle(case), case.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(cuda: Any, dtype: DType) -> None:
    case = make_case(dtype, 16, 2, 128, [3, 64, 1000, 5000], spread=300.0)
    assert_close(Launcher(cuda, case).run(case), oracle(case), dtype)


@pytest.mark.parametrize("base", [0, 1, 40, 63, 64, 1000, 4990])
def test_tree_masks(cuda: Any, base: int) -> None:
    rng = np.random.default_rng(base)
    masks = np.array([1, 2**63, 2**64 - 1, 0b1011, 0, *rng.integers(1, 2**63, 3)], np.uint64)
    if base == 0:
        masks[4] = 1
    case = make_case(DType.BFLOAT16, 16, 2, 128, [base + 64] * len(masks))
    case.positions[:] = -7
    out = Launcher(cuda, case).run(case, tree_masks=masks, tree_base=np.full(len(masks), base, np.int32))
    expected = np.stack([masked_row(case, row, base, int(mask)) for row, mask in enumerate(masks)])
    assert_close(out, expected, case.dtype)


def masked_row(case: Case, row: int, base: int, mask: int) -> np.ndarray[Any, Any]:
    visible = [*range(base), *(base + bit for bit in range(64) if mask >> bit & 1)]
    pages, offsets = case.block_tables[case.slots[row], np.array(visible) // PAGE_SIZE], np.array(visible) % PAGE_SIZE
    keys, values = (p[pages, :, offsets].transpose(1, 0, 2) for p in (case.k_pages, case.v_pages))
    heads = case.q[row].reshape(case.num_kv_heads, -1, case.head_dim)
    weights = softmax(heads @ keys.transpose(0, 2, 1) * np.float32(case.scale))
    return round_to((weights @ values).reshape(-1), case.dtype)


def test_a_row_that_sees_nothing_becomes_zeros(cuda: Any) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, 128, [64])
    out = Launcher(cuda, case).run(case, tree_masks=np.zeros(1, np.uint64), tree_base=np.zeros(1, np.int32))
    assert not out.any()
