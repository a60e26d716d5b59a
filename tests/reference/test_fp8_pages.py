"""Keys and values in fp8: codes by brute force, scales, and that a step's grouping changes no bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.operands import EPS, Data, make_rows, rope_of

from cpmrt.dtypes import DType, round_to
from cpmrt.ops import Fp8Pages, KVPages, QkvWeights
from cpmrt.reference.fp8_pages import e4m3_codes, e4m3_values, page_scales, store, values_of
from cpmrt.reference.ops import NumpyOps, rotate
from cpmrt.reference.sparse_attention import append_compressed

CODES = np.arange(256, dtype=np.uint8)
FINITE = CODES[(CODES & 0x7F) != 0x7F]
ANY = st.floats(width=32, allow_nan=False)
WITHIN = st.floats(-500, 500, width=32)
KV_HEADS, HEAD_DIM = 2, 32


def one(value: float) -> int:
    return int(e4m3_codes(np.array([value], np.float32))[0])


@pytest.mark.parametrize(("code", "value"), [
    (0x00, 0.0), (0x01, 2**-9), (0x07, 7 * 2**-9), (0x08, 2**-6), (0x38, 1.0), (0x3C, 1.5), (0xB8, -1.0), (0x7E, 448.0),
])  # fmt: skip
def test_codes_of_the_specification(code: int, value: float) -> None:
    assert e4m3_values(np.array([code]))[0] == value and one(value) == code


def test_every_code_stands_for_a_number_of_its_own() -> None:
    values = e4m3_values(FINITE)
    assert np.isfinite(values).all() and len(np.unique(values)) == len(FINITE) - 1  # two zeros
    assert np.array_equal(e4m3_codes(values), FINITE)
    assert np.isnan(e4m3_values(np.array([0x7F, 0xFF]))).all()
    assert one(float("nan")) & 0x7F == 0x7F


@given(st.one_of(ANY, WITHIN, st.floats(-0.03125, 0.03125, width=32)))
def test_the_nearest_number_ties_to_even_and_never_nan(value: float) -> None:
    code = one(value)
    distances = np.abs(e4m3_values(FINITE).astype(np.float64) - max(-448.0, min(448.0, value)))
    best = FINITE[distances == distances.min()]
    assert code in best
    if len(best) == 2 and value != 0:
        assert code % 2 == 0


@pytest.mark.parametrize("value", [448.1, 464.0, 1e9, float("inf"), float(np.finfo(np.float32).max)])
def test_what_is_too_large_becomes_the_largest(value: float) -> None:
    assert (one(value), one(-value)) == (0x7E, 0xFE)


@given(st.floats(0, 65504, width=32))
def test_scales_leave_the_headroom(largest: float) -> None:
    powers = [2.0**e for e in range(-8, 8)]
    expected = next((power for power in powers if largest <= 7 * power), powers[-1])
    assert page_scales(np.array([largest], np.float32))[0] == expected


def test_scales_of_what_is_not_finite() -> None:
    assert page_scales(np.array([np.inf, np.nan, 0.0], np.float32)).tolist() == [2.0**7, 2.0**7, 2.0**-8]


def empty_pages(count: int) -> Fp8Pages:
    """Return `count` pages with an earlier sequence's codes and scales, which must not matter."""
    random = np.random.default_rng(9)
    codes = random.integers(0, 256, (count, KV_HEADS, 64, HEAD_DIM), np.uint8)
    return Fp8Pages(codes, np.full((count, KV_HEADS), 2.0**5, np.float32))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(0, 3))
def test_grouping_into_steps_changes_no_bit(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    count = sum(sizes)
    heads = (random.standard_normal((count, KV_HEADS, HEAD_DIM)) * 10.0 ** random.integers(-3, 4)).astype(np.float32)
    table, positions = random.permutation(20), np.arange(count)
    grouped, alone = empty_pages(20), empty_pages(20)
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        part = slice(end - size, end)
        store(grouped, table[positions[part] // 64], positions[part] % 64, heads[part])
    for position in positions:
        store(alone, table[[position // 64]], positions[[position]] % 64, heads[[position]])
    assert np.array_equal(grouped.codes, alone.codes) and np.array_equal(grouped.scales, alone.scales)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0])
def test_values_come_back_within_a_sixteenth(spread: float) -> None:
    """Values come back within half of the last of three mantissa bits.

    Below the least normal number they come back within half of the smallest step.
    """
    heads = (np.random.default_rng(0).standard_normal((200, KV_HEADS, HEAD_DIM)) * spread).astype(np.float32)
    pages, positions = empty_pages(4), np.arange(200)
    store(pages, positions // 64, positions % 64, heads)
    stored = values_of(pages, np.arange(4)).transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, HEAD_DIM)[:200]
    scales = np.repeat(pages.scales, 64, axis=0)[:200, :, None]
    assert (np.abs(stored - heads) <= np.maximum(np.abs(heads) / 16, scales * 2.0**-10)).all()


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])
def test_qkv_stores_what_it_rotated_rounded_once(dtype: DType) -> None:
    data, ops, hidden = Data(dtype), NumpyOps(dtype), 96
    tables, positions, slots = data.tables(2, 3), np.arange(50, 110), np.full(60, 1)
    slots[-2:] = -1
    x, weight, q = data(60, hidden), data.weight(8 * HEAD_DIM, hidden), np.empty((60, 4 * HEAD_DIM), np.float32)
    k_pages, v_pages = empty_pages(6), empty_pages(6)
    before = k_pages.codes.copy()
    rope = rope_of(128, HEAD_DIM)
    rows = make_rows(positions, slots, tables)
    ops.qkv(q, KVPages(k_pages, v_pages), x, QkvWeights(None, weight), rope, rows, EPS)
    heads = (x @ weight.T).reshape(60, 8, HEAD_DIM)
    keys, values = rotate(heads[:, 4:6], *rope[:, positions]), heads[:, 6:]
    for pages, expected in ((k_pages, keys), (v_pages, values)):
        for row in range(58):
            page, offset = tables[1, positions[row] // 64], positions[row] % 64
            first = expected[row - offset] if row >= offset else None
            scale = np.float32(2.0**5) if first is None else page_scales(np.abs(first).max(axis=-1))[:, None]
            wanted = e4m3_values(e4m3_codes(expected[row] / scale))
            stored = e4m3_values(pages.codes[page, :, offset])
            # Products of another shape differ in their last bits, which changes how near ties are rounded.
            assert (stored == wanted).mean() > 0.97 and np.allclose(stored, wanted, rtol=0.13, atol=2**-9)
    untouched = np.setdiff1d(np.arange(6), tables[1, :2])
    assert np.array_equal(k_pages.codes[untouched], before[untouched])


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_attention_reads_what_is_stored(dtype: DType) -> None:
    data, ops, length = Data(dtype), NumpyOps(dtype), 150
    tables, positions = data.tables(2, 3), np.arange(length)
    k_pages, v_pages = empty_pages(6), empty_pages(6)
    for pages in (k_pages, v_pages):
        store(pages, tables[1, positions // 64], positions % 64, data(length, KV_HEADS, HEAD_DIM))
    plain = [values_of(pages, np.arange(6)) for pages in (k_pages, v_pages)]
    q, outs = data(length, 4 * HEAD_DIM), [np.empty((length, 4 * HEAD_DIM), np.float32) for _ in range(4)]
    rows = make_rows(positions, np.full(length, 1), tables, True)
    ops.prefill_attention(outs[0], q, KVPages(k_pages, v_pages), rows, 0.2)
    ops.prefill_attention(outs[1], q, KVPages(*plain), rows, 0.2)
    ops.decode_attention(outs[2], q, KVPages(k_pages, v_pages), rows, 0.2)
    ops.decode_attention(outs[3], q, KVPages(*plain), rows, 0.2)
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[2], outs[3])
    assert np.allclose(outs[0], round_to(outs[2], dtype), atol=2e-2 if dtype is DType.BFLOAT16 else 1e-5)


def test_compressed_keys_are_means_of_what_is_stored() -> None:
    data, length = Data(DType.BFLOAT16), 300
    table, positions = data.tables(1, 6)[0], np.arange(length)
    pages = empty_pages(6)
    store(pages, table[positions // 64], positions % 64, data(length, KV_HEADS, HEAD_DIM))
    found = []
    for keys in (pages, values_of(pages, np.arange(6))):
        k1, k2 = np.zeros((6, KV_HEADS, 4, HEAD_DIM), np.float32), np.zeros((6, KV_HEADS, HEAD_DIM), np.float32)
        append_compressed(k1, k2, keys, table, range(length), DType.BFLOAT16)
        found.append((k1, k2))
    for one, other in zip(*found, strict=True):
        assert one.any() and np.array_equal(one, other)
    stored = values_of(pages, table).transpose(1, 0, 2, 3).reshape(KV_HEADS, -1, HEAD_DIM)
    np.testing.assert_allclose(found[0][0][table[1], :, 2], stored[:, 80:112].mean(axis=1), rtol=1e-2, atol=1e-3)
    np.testing.assert_allclose(found[0][1][table[3]], stored[:, 128:256].mean(axis=1), rtol=1e-2, atol=1e-3)
