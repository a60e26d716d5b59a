"""rope_append against the NumPy op with an identity projection: head sizes, bias, head norms, pages, padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType, round_to
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import OPS
from cpmrt.reference.ops import rms_norm, rotate

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
GUARD, EPS, MAX_CONTEXT, PAGES = 256, 1e-5, 400, 21


@dataclass
class Case:
    """Rows of a chunk, and what is applied to them, as float32 that holds storage values."""

    dtype: DType
    heads: int
    kv_heads: int
    head_dim: int
    qkv: Any
    bias: Any | None
    q_norm: Any | None
    k_norm: Any | None
    rope: Any
    positions: Any
    slots: Any
    block_tables: Any
    locations: Any | None = None
    keeps_unrotated: bool = False

    def take(self, count: int) -> Case:
        part = slice(0, count)
        return replace(self, qkv=self.qkv[part], positions=self.positions[part], slots=self.slots[part])


def make_case(dtype: DType, heads: int, kv_heads: int, head_dim: int, has_bias: bool, has_norms: bool) -> Case:
    rng = np.random.default_rng(head_dim + heads)
    rows, width = 150, (heads + 2 * kv_heads) * head_dim

    def normal(*shape: int) -> Any:
        return round_to(rng.standard_normal(shape, np.float32), dtype)

    angles = np.outer(np.arange(MAX_CONTEXT), 1e4 ** -(np.arange(head_dim // 2) / (head_dim // 2)))
    positions = np.arange(77, 77 + rows, dtype=np.int32)
    slots = np.full(rows, 2, np.int32)
    slots[-3:], positions[-3:] = -1, (0, -1, 10**6)  # the bucket is larger than the chunk
    return Case(
        dtype, heads, kv_heads, head_dim, normal(rows, width), normal(width) if has_bias else None,
        1 + normal(head_dim) / 4 if has_norms else None, 1 + normal(head_dim) / 4 if has_norms else None,
        np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32), positions, slots,
        rng.permutation(PAGES).reshape(3, 7).astype(np.int32),
    )  # fmt: skip


def expected(case: Case) -> list[Any]:
    """Return q and the pages of k and v, NaN where nothing is stored; if the case keeps them, also q and the pages of k
    before RoPE."""
    projected = case.qkv if case.bias is None else case.qkv + case.bias
    heads = projected.reshape(len(case.qkv), -1, case.head_dim)
    q, k, v = np.split(heads, [case.heads, case.heads + case.kv_heads], axis=1)
    if case.q_norm is not None and case.k_norm is not None:
        q_norm, k_norm = round_to(case.q_norm, case.dtype), round_to(case.k_norm, case.dtype)
        q, k = rms_norm(q, q_norm, EPS), rms_norm(k, k_norm, EPS)
    cos, sin = case.rope[:, np.where(case.slots < 0, 0, case.positions)]
    pages = np.full((3, PAGES, case.kv_heads, PAGE_SIZE, case.head_dim), np.nan, np.float32)
    for row in np.flatnonzero(case.slots >= 0):
        place = (case.positions if case.locations is None else case.locations)[row]
        at = (case.block_tables[case.slots[row], place // PAGE_SIZE], slice(None), place % PAGE_SIZE)
        pages[0][at], pages[1][at], pages[2][at] = rotate(k, cos, sin)[row], v[row], k[row]
    rotated, unrotated = (array.reshape(len(q), -1) for array in (rotate(q, cos, sin), q))
    arrays = (rotated, pages[0], pages[1], unrotated, pages[2])
    return [round_to(array, case.dtype) for array in arrays[: 5 if case.keeps_unrotated else 3]]


def run(cuda: Any, case: Case, pdl: bool = False, turns: bool = True) -> list[Any]:
    """Return the kernel's arrays, in the order of `expected`; the guards around them must stay poison. Without `turns`
    there is no RoPE."""
    queries, pages = (len(case.qkv), case.heads * case.head_dim), (PAGES, case.kv_heads, PAGE_SIZE, case.head_dim)
    shapes = [queries, pages, pages] + ([queries, pages] if case.keeps_unrotated else [])
    sizes = [int(np.prod(shape)) for shape in shapes]
    outs = [cuda.array(np.full(size + 2 * GUARD, np.nan, np.float32), case.dtype) for size in sizes]
    weights = [None if w is None else cuda.array(w, case.dtype) for w in (case.bias, case.q_norm, case.k_norm)]
    arrays = case.rope if turns else None, case.positions, case.locations, case.slots, case.block_tables
    rows = [None if values is None else cuda.array(values) for values in arrays]
    numbers = (len(case.qkv), case.heads, case.kv_heads, case.block_tables.shape[1], MAX_CONTEXT)
    lanes = 4 if case.head_dim == 64 else 8
    grid = -(-len(case.qkv) * (case.heads + 2 * case.kv_heads) * lanes // 256)
    switches = {} if turns else {"NO_ROPE": 1}
    kernel = cuda.kernel("rope_append", case.dtype, HEAD_DIM=case.head_dim, FP8=0, **switches)
    targets = [out[GUARD:] for out in outs] + [None] * (5 - len(outs))
    scalars = (*map(np.int32, numbers), np.float32(EPS))
    kernel(grid, 256, *targets, cuda.array(case.qkv, case.dtype), *weights, *rows, *scalars, pdl=pdl)
    results = [cuda.numpy(out, case.dtype) for out in outs]
    for result in results:
        assert np.isnan(result[:GUARD]).all() and np.isnan(result[-GUARD:]).all(), "wrote outside an output"
    return [result[GUARD:-GUARD].reshape(shape) for result, shape in zip(results, shapes, strict=True)]


def same(outs: list[Any], others: list[Any]) -> bool:
    return all(np.array_equal(out, other, equal_nan=True) for out, other in zip(outs, others, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 2, 128), (16, 2, 64), (6, 6, 96), (1, 1, 64), (3, 1, 128)]
)
@pytest.mark.parametrize(("has_bias", "has_norms"), [(False, False), (True, False), (False, True), (True, True)])
def test_rows_are_the_oracles(
    cuda: Any, dtype: DType, heads: int, kv_heads: int, head_dim: int, has_bias: bool, has_norms: bool
) -> None:
    case = make_case(dtype, heads, kv_heads, head_dim, has_bias, has_norms)
    outs = run(cuda, case)
    for out, wanted in zip(outs, expected(case), strict=True):
        np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
        distance = np.linalg.norm(np.nan_to_num(out - wanted))
        assert distance <= OPS["qkv"].tolerance[dtype] * np.linalg.norm(np.nan_to_num(wanted))
    assert same(run(cuda, case, pdl=True), outs)
    case.keeps_unrotated = True
    more = run(cuda, case, pdl=True)
    assert same(more[:3], outs)
    for out, wanted in zip(more[3:], expected(case)[3:], strict=True):
        np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
        distance = np.linalg.norm(np.nan_to_num(out - wanted))
        assert distance <= OPS["qkv"].tolerance[dtype] * np.linalg.norm(np.nan_to_num(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(cuda: Any, dtype: DType) -> None:
    case = make_case(dtype, 6, 2, 96, True, True)
    q, k_pages, _ = run(cuda, case)
    for count in (1, 5, 64):
        some_q, some_k, _ = run(cuda, case.take(count))
        np.testing.assert_array_equal(some_q, q[:count])
        stored = ~np.isnan(some_k)
        assert stored.sum() == count * 2 * 96
        np.testing.assert_array_equal(some_k[stored], k_pages[stored])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
def test_without_rope_heads_are_those_before_it(cuda: Any, dtype: DType, has_norms: bool) -> None:
    case = make_case(dtype, 6, 2, 128, has_norms, has_norms)
    case.keeps_unrotated = True
    _, _, values, queries, keys = run(cuda, case)
    case.keeps_unrotated = False
    assert same(run(cuda, case, turns=False), [queries, keys, values])


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_may_lie_elsewhere(cuda: Any, dtype: DType) -> None:
    case = make_case(dtype, 6, 2, 96, True, True)
    plain_q, plain_k, plain_v = run(cuda, case)
    case.locations = np.random.default_rng(0).permutation(MAX_CONTEXT)[: len(case.slots)].astype(np.int32)
    case.locations[case.slots < 0] = 10**6
    case.keeps_unrotated = True
    q, *pages, q_nope, nope_pages = run(cuda, case)
    np.testing.assert_array_equal(q, plain_q)
    for out, wanted in zip((q_nope, nope_pages), expected(case)[3:], strict=True):
        np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    case.keeps_unrotated = False
    kept = np.flatnonzero(case.slots >= 0)
    for page, plain in zip(pages, (plain_k, plain_v), strict=True):
        places, before = ([at // PAGE_SIZE, at % PAGE_SIZE] for at in (case.locations[kept], case.positions[kept]))
        table = case.block_tables[2]
        np.testing.assert_array_equal(page[table[places[0]], :, places[1]], plain[table[before[0]], :, before[1]])
        assert (~np.isnan(page)).sum() == (~np.isnan(plain)).sum()
    case.locations = np.where(case.slots < 0, 0, case.positions).astype(np.int32)
    assert same(run(cuda, case), [plain_q, plain_k, plain_v])
