"""Each NumPy op against brute force in float64, at its edges, into poisoned outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reference import brute_force
from reference.operands import EPS, Data, Poisoned, check, filled_pages, make_rows, rope_of

from cpmrt.dtypes import DType
from cpmrt.ops import KVPages, QkvWeights, Rows
from cpmrt.reference.ops import NumpyOps, gated, rms_norm, rotate, silu
from cpmrt.reference.tiles import softmax

PAGE = 64
DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
ROWS = pytest.mark.parametrize("num_rows", [1, 64, 65])


@pytest.mark.parametrize("shape", [(1, 8), (3, 64), (2, 5, 96), (65, 128)])
def test_rms_norm(shape):
    data = Data()
    x, weight = data(*shape, scale=3.0), data.norm(shape[-1])
    np.testing.assert_allclose(rms_norm(x, weight, EPS), brute_force.rms_norm(x, weight, EPS), rtol=1e-5, atol=1e-6)


def test_rms_norm_of_zeros_is_zero():
    assert not rms_norm(np.zeros((2, 16), np.float32), np.ones(16, np.float32), 1e-6).any()


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_rotate(head_dim):
    data, rope = Data(), rope_of(70, head_dim)
    heads, positions = data(3, 5, head_dim), np.array([0, 1, 69])
    actual = rotate(heads, rope[0, positions], rope[1, positions])
    for row, position in enumerate(positions):
        for head in range(5):
            expected = brute_force.rotate(heads[row, head], rope[0, position], rope[1, position])
            np.testing.assert_allclose(actual[row, head], expected, rtol=1e-5, atol=1e-6)


def test_silu_and_softmax_stay_finite_far_out():
    x = np.array([-200.0, -88.0, -1.0, 0.0, 1.0, 88.0, 200.0], np.float32)
    np.testing.assert_allclose(silu(x), brute_force.silu(np.clip(x, -88, None)), rtol=1e-5, atol=1e-30)
    weights = softmax(np.array([[1e4, 1e4 - 1.0, -1e4]], np.float32))[0]
    np.testing.assert_allclose(weights, [1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(1.0)), 0.0], rtol=1e-6)


@DTYPES
@ROWS
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_embed(dtype, num_rows, scale):
    data, out = Data(dtype), Poisoned(num_rows, 96)
    table, token_ids = data(40, 96), data.random.integers(0, 40, num_rows)
    NumpyOps(dtype).embed(out.view, token_ids, table, scale)
    check("embed", dtype, out.written(), np.stack([table[t].astype(np.float64) * scale for t in token_ids]))


@DTYPES
@ROWS
@pytest.mark.parametrize("with_bias", [False, True])
def test_project_residual(dtype, num_rows, with_bias):
    data = Data(dtype)
    before, inner, weight = data(num_rows, 96), data(num_rows, 160), data.weight(96, 160)
    bias, out = data(96) if with_bias else None, Poisoned(num_rows, 96, content=before)
    NumpyOps(dtype).project_residual(out.view, inner, weight, bias, 0.2475)
    added = brute_force.linear(inner, weight) + (0.0 if bias is None else bias)
    check("project_residual", dtype, out.written(), before + 0.2475 * added)


@DTYPES
@ROWS
def test_gate_up(dtype, num_rows):
    data, out = Data(dtype), Poisoned(num_rows, 72)
    x, norm, weight = data(num_rows, 96, scale=2.0), data.norm(96), data.weight(144, 96)
    NumpyOps(dtype).gate_up(out.view, x, norm, weight, EPS)
    both = brute_force.linear(brute_force.rms_norm(x, norm, EPS), weight)
    check("gate_up", dtype, out.written(), brute_force.silu(both[:, :72]) * both[:, 72:])


@DTYPES
@ROWS
def test_gates_of_a_fatrelu(dtype, num_rows):
    data, out = Data(dtype), Poisoned(num_rows, 72)
    x, norm, weight = data(num_rows, 96, scale=2.0), data.norm(96), data.weight(144, 96)
    NumpyOps(dtype).gate_up(out.view, x, norm, weight, EPS, fatrelu=0.25)
    both = brute_force.linear(brute_force.rms_norm(x, norm, EPS), weight)
    kept = both[:, :72] > 0.25
    # Gates near the threshold are left out: rounding the normalised rows may carry them over it.
    is_sure = np.abs(both[:, :72] - 0.25) > 0.05
    values = out.written()
    assert ((values == 0) == ~kept)[is_sure].all() and 0.1 < kept.mean() < 0.9
    check("gate_up", dtype, np.where(is_sure, values, 0), np.where(is_sure & kept, both[:, :72] * both[:, 72:], 0))


def test_a_gate_at_the_threshold_is_closed_whatever_up_is():
    gate = np.array([0.5, np.nextafter(np.float32(0.5), np.float32(1)), -1, np.nan, np.inf, 0.1], np.float32)
    up = np.array([2, 2, np.inf, np.nan, -1, np.nan], np.float32)
    np.testing.assert_array_equal(gated(gate, up, 0.5), np.float32([0, gate[1] * 2, 0, 0, -np.inf, 0]))


@DTYPES
@ROWS
@pytest.mark.parametrize("divisor", [1.0, 16.0])
def test_lm_head(dtype, num_rows, divisor):
    data, out = Data(dtype), Poisoned(num_rows, 130)
    x, norm, weight = data(num_rows, 96), data.norm(96), data.weight(130, 96)
    NumpyOps(dtype).lm_head(out.view, x, norm, weight, EPS, divisor)
    check("lm_head", dtype, out.written(), brute_force.linear(brute_force.rms_norm(x, norm, EPS), weight) / divisor)


@ROWS
def test_without_a_norm_rows_enter_the_head_as_they_are(num_rows):
    data, out = Data(DType.BFLOAT16), Poisoned(num_rows, 130)
    x, weight = data(num_rows, 96, scale=3.0), data.weight(130, 96)
    NumpyOps(DType.BFLOAT16).lm_head(out.view, x, None, weight, EPS, 1.0)
    check("lm_head", DType.BFLOAT16, out.written(), brute_force.linear(x, weight))


class Qkv:
    """Operands of one qkv call on NaN-filled pages."""

    def __init__(self, dtype: DType, rows: Rows, heads: int, kv_heads: int, head_dim: int, extras: bool):
        data = Data(dtype)
        self.dtype, self.rows, self.heads, self.kv_heads, self.head_dim = dtype, rows, heads, kv_heads, head_dim
        num_rows, total = len(rows.positions), (heads + 2 * kv_heads) * head_dim
        self.x, self.norm, self.weight = data(num_rows, 96), data.norm(96), data.weight(total, 96)
        self.bias = data(total, scale=0.5) if extras else None
        self.q_norm, self.k_norm = (data.norm(head_dim), data.norm(head_dim)) if extras else (None, None)
        self.rope = rope_of(rows.block_tables.shape[1] * PAGE, head_dim)
        self.q = Poisoned(num_rows, heads * head_dim)
        self.pages = [np.full((rows.block_tables.size, kv_heads, PAGE, head_dim), np.nan, np.float32) for _ in "kv"]

    def run(self) -> None:
        weights = QkvWeights(self.norm, self.weight, self.bias, self.q_norm, self.k_norm)
        NumpyOps(self.dtype).qkv(self.q.view, KVPages(*self.pages), self.x, weights, self.rope, self.rows, EPS)

    def expected(self) -> tuple[Any, Any, Any]:
        """Return q, k and v, each [T, heads, D]."""
        x = self.x if self.norm is None else brute_force.rms_norm(self.x, self.norm, EPS)
        projected = brute_force.linear(x, self.weight)
        projected += 0.0 if self.bias is None else self.bias
        heads = projected.reshape(len(self.x), -1, self.head_dim)
        q, k, v = np.split(heads, [self.heads, self.heads + self.kv_heads], axis=1)
        if self.q_norm is not None:
            q, k = brute_force.rms_norm(q, self.q_norm, EPS), brute_force.rms_norm(k, self.k_norm, EPS)
        return self._rotated(q), self._rotated(k), v

    def _rotated(self, heads: Any) -> Any:
        cos, sin = self.rope[:, self.rows.positions]
        return np.array([[brute_force.rotate(h, cos[row], sin[row]) for h in heads[row]] for row in range(len(heads))])


@DTYPES
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "bias and norms"])
@pytest.mark.parametrize("positions", [[0], [63], [64], list(range(64)), list(range(40, 105))], ids=len)
def test_qkv_appends_across_page_borders(dtype, extras, positions):
    tables = Data().tables(3, 3)
    call = Qkv(dtype, make_rows(positions, [1] * len(positions), tables, True), 4, 2, 64, extras)
    call.run()
    q, *kv = call.expected()
    check("qkv", dtype, call.q.written(), q.reshape(len(positions), -1))
    for pages, expected in zip(call.pages, kv, strict=True):
        stored = np.stack([pages[tables[1, p // PAGE], :, p % PAGE] for p in positions])
        check("qkv", dtype, stored, expected)
        assert np.isfinite(pages).sum() == stored.size


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 64), (4, 1, 96), (16, 1, 128), (6, 6, 64)])
def test_qkv_of_rows_in_different_slots(heads, kv_heads, head_dim):
    tables = Data().tables(4, 2)
    positions, slots = [0, 127, 64, 63], [2, 0, 3, 1]
    call = Qkv(DType.FLOAT32, make_rows(positions, slots, tables), heads, kv_heads, head_dim, True)
    call.run()
    q, *kv = call.expected()
    check("qkv", DType.FLOAT32, call.q.written(), q.reshape(4, -1))
    for pages, expected in zip(call.pages, kv, strict=True):
        places = [(tables[s, p // PAGE], p % PAGE) for s, p in zip(slots, positions, strict=True)]
        check("qkv", DType.FLOAT32, np.stack([pages[page, :, offset] for page, offset in places]), expected)
        assert np.isfinite(pages).sum() == expected.size


def test_qkv_stores_at_locations_and_rotates_by_positions():
    tables, positions, locations = Data().tables(2, 3), [70, 71, 71, 5], np.array([70, 71, 140, -9])
    rows = replace(make_rows(positions, [1, 1, 1, -1], tables), locations=locations)
    call = Qkv(DType.FLOAT32, rows, 4, 2, 64, True)
    call.norm = None
    call.run()
    q, *kv = call.expected()
    check("qkv", DType.FLOAT32, call.q.written()[:3], q[:3].reshape(3, -1))
    for pages, expected in zip(call.pages, kv, strict=True):
        stored = np.stack([pages[tables[1, place // PAGE], :, place % PAGE] for place in locations[:3]])
        check("qkv", DType.FLOAT32, stored, expected[:3])
        assert np.isfinite(pages).sum() == stored.size


def test_rows_without_a_slot_are_stored_nowhere_and_see_nothing():
    data, tables = Data(), Data().tables(2, 1)
    call = Qkv(DType.FLOAT32, make_rows([10**6, 3, -1], [-1, 1, -1], tables), 2, 1, 64, False)
    call.run()
    assert np.isfinite(call.pages[0]).sum() == np.isfinite(call.pages[1]).sum() == 64
    k_pages, v_pages = filled_pages(data, tables, [0, 4], 1, 64)
    out = Poisoned(3, 128)
    NumpyOps(DType.FLOAT32).decode_attention(out.view, data(3, 128), KVPages(k_pages, v_pages), call.rows, 0.125)
    assert not out.written()[[0, 2]].any() and out.view[1].all()


@DTYPES
@pytest.mark.parametrize(("group", "kv_heads", "head_dim"), [(1, 2, 64), (4, 2, 96), (16, 1, 128), (16, 2, 64)])
def test_decode_attention(dtype, group, kv_heads, head_dim):
    data = Data(dtype)
    lengths = [1, 64, 65, 128, 130]
    tables = data.tables(len(lengths), 3)
    k_pages, v_pages = filled_pages(data, tables, lengths, kv_heads, head_dim)
    slots = np.array([3, 0, 4, 2, 1])
    positions = np.array(lengths)[slots] - 1
    q, out = data(5, group * kv_heads * head_dim), Poisoned(5, group * kv_heads * head_dim)
    rows = make_rows(positions, slots, tables)
    NumpyOps(dtype).decode_attention(out.view, q, KVPages(k_pages, v_pages), rows, head_dim**-0.5)
    expected = brute_force.attention(q, k_pages, v_pages, positions, slots, tables, head_dim**-0.5)
    check("decode_attention", dtype, out.written(), expected)


@DTYPES
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 64), (0, 65), (63, 2), (64, 64), (100, 7)])
def test_prefill_attention(dtype, group, start, count):
    data, head_dim, kv_heads = Data(dtype), 64, 2
    tables = data.tables(2, 3)
    k_pages, v_pages = filled_pages(data, tables, [0, start + count], kv_heads, head_dim)
    positions, slots = np.arange(start, start + count), np.ones(count, int)
    q, out = data(count, group * kv_heads * head_dim), Poisoned(count, group * kv_heads * head_dim)
    rows = make_rows(positions, slots, tables, True)
    NumpyOps(dtype).prefill_attention(out.view, q, KVPages(k_pages, v_pages), rows, head_dim**-0.5)
    expected = brute_force.attention(q, k_pages, v_pages, positions, slots, tables, head_dim**-0.5)
    check("prefill_attention", dtype, out.written(), expected)


def test_attention_of_one_token_is_its_value():
    data = Data()
    tables = data.tables(1, 1)
    k_pages, v_pages = filled_pages(data, tables, [1], 2, 64)
    out = Poisoned(1, 256)
    rows = make_rows([0], [0], tables)
    NumpyOps(DType.FLOAT32).decode_attention(out.view, data(1, 256), KVPages(k_pages, v_pages), rows, 0.125)
    assert np.array_equal(out.view.reshape(2, 2, 64), np.repeat(v_pages[tables[0, 0], :, :1], 2, axis=1))


def test_very_large_scores_do_not_overflow():
    data = Data()
    tables = data.tables(1, 1)
    k_pages, v_pages = filled_pages(data, tables, [9], 1, 64)
    for attend, is_prefill in (("decode_attention", False), ("prefill_attention", True)):
        out, rows = Poisoned(1, 64), make_rows([8], [0], tables, is_prefill)
        kv, q = KVPages(k_pages, v_pages), data(1, 64, scale=1e6)
        getattr(NumpyOps(DType.FLOAT32), attend)(out.view, q, kv, rows, 1.0)
        out.written()


def test_wrong_shapes_are_refused():
    data, ops = Data(), NumpyOps(DType.FLOAT32)
    with pytest.raises(ValueError, match="gate_up: weight"):
        ops.gate_up(data(2, 8), data(2, 16), data(16), data(16, 15), EPS)
    with pytest.raises(ValueError, match="lm_head: x"):
        ops.lm_head(data(2, 8), data(3, 16), data(16), data(8, 16), EPS, 1.0)
    rows = replace(make_rows([0], [0], data.tables(1, 1)), positions=np.arange(2))
    with pytest.raises(ValueError, match="decode_attention: positions"):
        kv = KVPages(data(1, 1, 64, 64), data(1, 1, 64, 64))
        ops.decode_attention(data(1, 64), data(1, 64), kv, rows, 1.0)
