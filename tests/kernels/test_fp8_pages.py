"""KV pages in fp8 on a GPU: rope_append stores them, decode_attention reads them, expand_pages turns them into 16
bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_cases import AttentionDevice, Case, assert_close, fp8_of, make_case, oracle
from fp8_store import HEADS, KV_HEADS, POISON, Store
from slow_writer import SlowWriter

from cpmrt.dtypes import DType, to_float32
from cpmrt.memory.caches import PAGE_SIZE
from cpmrt.ops import Fp8Pages, RowKind
from cpmrt.reference.fp8_pages import e4m3_codes, e4m3_values, page_scales, values_of
from cpmrt.reference.ops import rotate

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 300, 1000, 2048, 2049, 5000]


# ---- storing ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_codes_and_scales_are_the_oracles(cuda: Any, dtype: DType, head_dim: int) -> None:
    store, positions = Store(cuda, dtype, head_dim), np.arange(64, 354)
    store.append([*range(290), 290], [*positions, 10**6], [1] * 290 + [-1])
    heads = store.qkv[:290].reshape(290, -1, head_dim)[:, HEADS:]
    keys, values = rotate(heads[:, :KV_HEADS], *store.rope[:, positions]), heads[:, KV_HEADS:]
    pages, offsets = store.table[1, positions // PAGE_SIZE], positions % PAGE_SIZE
    for stored, before, wanted in zip(store.pages(), store.before, (keys, values), strict=True):
        scales = page_scales(np.abs(wanted[offsets == 0]).max(axis=-1))
        assert np.array_equal(stored.scales[pages[offsets == 0]], scales)
        assert (np.delete(stored.scales, np.unique(pages), axis=0) == POISON).all()
        codes = e4m3_codes(wanted / scales[np.arange(290) // PAGE_SIZE][..., None])
        actual = stored.codes[pages, :, offsets]
        # RoPE's products and sums, which the compiler may contract to FMAs, can tip a tie in the rounding to a code.
        assert (actual == codes).mean() > 0.999
        np.testing.assert_allclose(e4m3_values(actual), e4m3_values(codes), rtol=0.13, atol=2**-9)
        expected = before.copy()
        expected[pages, :, offsets] = actual
        assert np.array_equal(stored.codes, expected), "wrote elsewhere"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[200], [1] * 200, [64, 64, 64, 8], [63, 2, 61, 5, 69], [7] * 28 + [4]], ids=str)
def test_grouping_into_launches_changes_no_bit(cuda: Any, dtype: DType, sizes: list[int]) -> None:
    whole, parts, end = Store(cuda, dtype, 128), Store(cuda, dtype, 128), 0
    whole.append(list(range(200)), list(range(200)), [2] * 200)
    for size in sizes:
        part = list(range(end, end + size))
        parts.append(part, part, [2] * size)
        end += size
    for one, other in zip(whole.pages(), parts.pages(), strict=True):
        assert np.array_equal(one.codes, other.codes) and np.array_equal(one.scales, other.scales)


def test_rows_of_several_slots_take_the_scales_of_their_own_pages(cuda: Any) -> None:
    """Each row takes the scale of its own slot's page, although another slot's row stands as many rows before it as its
    offset within the page, where the page's first token would be."""
    alone, together = Store(cuda, DType.BFLOAT16, 64), Store(cuda, DType.BFLOAT16, 64)
    for store in (alone, together):
        for slot in range(3):
            store.append(list(range(slot * 70, slot * 70 + 66)), list(range(66)), [slot] * 66)
    rows, positions, slots = [250, 251, 252], [66, 65, 66], [0, 1, 2]
    together.append(rows, positions, slots)
    for row in zip(rows, positions, slots, strict=True):
        alone.append(*([value] for value in row))
    for one, other in zip(alone.pages(), together.pages(), strict=True):
        assert np.array_equal(one.codes, other.codes) and np.array_equal(one.scales, other.scales)


# ---- reading ----


class Reader(AttentionDevice):
    """Attention over a case's pages, held as fp8 codes and scales."""

    def __init__(self, cuda: Any, case: Case, **settings: Any):
        self.pages = fp8_of(case.k_pages, 0), fp8_of(case.v_pages, 1)
        super().__init__(cuda, case, pages=self.pages, **settings)

    def oracle(self, case: Case) -> np.ndarray[Any, Any]:
        case = case.take(list(range(len(case.q))))
        case.k_pages, case.v_pages = self.pages
        return oracle(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 3), (4, 1), (8, 2), (16, 2), (20, 2)])
def test_attention_matches_the_numpy_op(cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int) -> None:
    case = make_case(dtype, group, kv_heads, head_dim, LENGTHS)
    reader = Reader(cuda, case)
    assert_close(reader.run(case), reader.oracle(case), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "head_dim"), [(16, 128), (5, 96), (1, 64)])
@pytest.mark.parametrize("arch", [86, 87])
def test_attention_as_without_clusters(cuda: Any, dtype: DType, group: int, head_dim: int, arch: int) -> None:
    """Attention matches the oracle with the depth of ring that these architectures without clusters get."""
    case = make_case(dtype, group, 2, head_dim, LENGTHS)
    reader = Reader(cuda, case, capability=arch)
    assert_close(reader.run(case), reader.oracle(case), dtype)


def test_a_row_does_not_depend_on_the_others(cuda: Any) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, 128, [*LENGTHS, 3000])
    reader = Reader(cuda, case)
    alone = np.concatenate([reader.run(case.row(i)) for i in range(len(case.q))])
    for num_rows in (2, 5, 8, 12, 16, 31, 32, 64):
        rows = [(7 * i + num_rows) % len(case.q) for i in range(num_rows)]
        assert np.array_equal(reader.run(case.take(rows), pdl=num_rows % 2 == 0), alone[rows]), num_rows
    assert np.array_equal(reader.run(case, launches=20, pdl=True), alone)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_short_row_alone_has_the_bits_of_one_of_any_length(cuda: Any, head_dim: int) -> None:
    case = make_case(DType.BFLOAT16, 16, 2, head_dim, [1, 63, 64, 65, 1000, 2047, 2048, 2049, 5000])
    reader = Reader(cuda, case)
    assert reader.plan.has_short_launch(1) == (reader.plan.decode.cluster > 1)
    for row in map(case.row, range(len(case.q))):
        unknown = reader.run(row)
        assert np.array_equal(reader.run(row, kind=RowKind("short")), unknown)
        assert np.array_equal(reader.run(row, kind=RowKind("short"), launches=20, pdl=True), unknown)


@pytest.mark.parametrize("positions", [range(1), range(1087, 1088), range(1088, 1089), range(120, 136), range(63)])
@pytest.mark.parametrize("sms", [132, 8])
def test_attention_sees_what_the_kernel_before_it_writes(cuda: Any, positions: range, sms: int) -> None:
    """Attention reads the codes of a step's tokens, and the scale of a page that one of them begins, after its wait:
    until the writer is done both are other ones. With few splits a warp has read neighbouring scales before."""
    case = make_case(DType.BFLOAT16, 8, 2, 64, [positions.stop])
    case.q = np.repeat(case.q, len(positions), axis=0)
    case.positions, case.slots = np.array(positions, np.int32), np.zeros(len(positions), np.int32)
    reader = Reader(cuda, case, sms=sms)
    expected = reader.run(case)
    assert_close(expected, reader.oracle(case), case.dtype)
    targets = [array for part in (reader.kv.k, reader.kv.v) for array in (part.codes, part.scales)]
    before = [np.array(cuda.numpy(array)) for array in targets]
    for position in positions:
        page, offset = case.block_tables[0, position // PAGE_SIZE], position % PAGE_SIZE
        for codes, scales in zip(before[::2], before[1::2], strict=True):
            codes[page, :, offset] = 0x7E
            if offset == 0:
                scales[page] *= 8
    after = [array.copy() for array in targets]
    writer = SlowWriter(cuda, targets, [cuda.array(values) for values in before], after)
    out = cuda.array(np.zeros_like(case.q), case.dtype)
    attend = reader.attention(out, case, pdl=True)
    for _ in range(3):
        writer.launch()
        attend()
        assert np.array_equal(cuda.numpy(out, case.dtype), expected)


# ---- expanding ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("blocks", [1, 512])
def test_every_code_and_scale_expands_exactly(cuda: Any, dtype: DType, head_dim: int, blocks: int) -> None:
    random = np.random.default_rng(3)
    shape, start, count = (9, 3, PAGE_SIZE, head_dim), 100, 157  # five pages
    codes = random.integers(0, 256, (2, *shape), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80
    scales = 2.0 ** random.integers(-8, 8, (2, *shape[:2])).astype(np.float32)
    table = np.array([[0] * 7, [8, 3, 5, 0, 7, 1, 2]], np.int32)
    outs = [cuda.array(np.full((7, *shape[1:]), np.nan, np.float32), dtype) for _ in "kv"]
    kernel = cuda.kernel("expand_pages", dtype, HEAD_DIM=head_dim)
    chunk = cuda.array(np.array([1, start, count, 0], np.int32))
    arrays = [*map(cuda.array, codes), *map(cuda.array, scales), cuda.array(table), chunk]
    kernel((blocks, 6), 256, *outs, *arrays, np.int32(3), np.int32(7))
    for out, code, scale in zip(outs, codes, scales, strict=True):
        expanded = cuda.numpy(out, dtype)
        wanted = values_of(Fp8Pages(code, scale), table[1, :5])
        assert np.array_equal(expanded[:5], wanted) and np.isnan(expanded[5:]).all()


def test_an_empty_slot_expands_nothing(cuda: Any) -> None:
    outs = [cuda.array(np.full((2, 1, PAGE_SIZE, 64), 7, np.uint16)) for _ in "kv"]
    codes = [cuda.array(np.ones((2, 1, PAGE_SIZE, 64), np.uint8)) for _ in "kv"]
    scales = [cuda.array(np.ones((2, 1), np.float32)) for _ in "kv"]
    kernel = cuda.kernel("expand_pages", DType.BFLOAT16, HEAD_DIM=64)
    for chunk in ([-1, 5, 20, 0], [0, 0, 0, 0]):
        table, chunk_array = cuda.array(np.zeros((1, 2), np.int32)), cuda.array(np.array(chunk, np.int32))
        kernel((4, 2), 256, *outs, *codes, *scales, table, chunk_array, np.int32(1), np.int32(2))
        assert all((cuda.numpy(out) == 7).all() for out in outs)
    assert np.isfinite(to_float32(cuda.numpy(outs[0]), DType.BFLOAT16)).all()
