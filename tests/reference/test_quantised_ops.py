"""NumPy matrix products with quantised weights: against float64, row invariance, and every op that takes one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpmrt.dtypes import F32, Array, DType, round_to
from cpmrt.ops import KVPages, QkvWeights, QuantizedWeight, Rows
from cpmrt.reference import quantized
from cpmrt.reference.ops import NumpyOps, linear


def random_weight(
    seed: int, n: int, k: int, group: int, *, zeros: bool = False, perm: bool = False, bits: int = 4
) -> QuantizedWeight:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, (n, k // 2), np.uint8) if bits == 4 else random.integers(-127, 128, (n, k), np.int8)
    scales = round_to(random.uniform(0.01, 0.02, (n, k // group)).astype(np.float32), DType.BFLOAT16)
    zero_points = random.integers(0, 16, (n, k // group), np.uint8) if zeros else None
    order = random.permutation(k).astype(np.int32) if perm else None
    return QuantizedWeight(codes, scales, zero_points, order, (n, k), group, bits)


def brute_force(weight: QuantizedWeight) -> Array:
    """Return the weight as float64 [N, K], columns in the model's order, element by element by the definition."""
    n, k = weight.shape
    out = np.empty((n, k))
    for row in range(n):
        for column in range(k):
            byte = int(weight.codes[row, column // 2 if weight.bits == 4 else column])
            code = byte if weight.bits == 8 else byte >> 4 if column % 2 else byte & 15
            group = column // weight.group_size
            zero = 0 if weight.bits == 8 else 8 if weight.zeros is None else int(weight.zeros[row, group])
            feature = column if weight.perm is None else weight.perm[column]
            out[row, feature] = float(weight.scales[row, group]) * (code - zero)
    return out


@given(
    seed=st.integers(0, 2**32), n=st.integers(1, 9), group=st.sampled_from([2, 8, 24, 48]), rows=st.integers(1, 70),
    zeros=st.booleans(), perm=st.booleans(), bits=st.sampled_from([4, 8]),
)  # fmt: skip
def test_products_are_those_of_the_definition(
    seed: int, n: int, group: int, rows: int, zeros: bool, perm: bool, bits: int
) -> None:
    weight = random_weight(seed, n, 48, group, zeros=zeros and bits == 4, perm=perm, bits=bits)
    x = np.random.default_rng(seed).standard_normal((rows, 48), np.float32)
    expected = x.astype(np.float64) @ brute_force(weight).T
    np.testing.assert_allclose(linear(x, weight), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max() + 1e-6)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(0, 37, 64, 32, zeros=True)
    whole = np.concatenate([values for _, values in quantized.dequantized(weight)])
    monkeypatch.setattr(quantized, "_BLOCK", 5 * 64)
    blocks = list(quantized.dequantized(weight))
    assert [rows.stop - rows.start for rows, _ in blocks] == [5] * 7 + [2]
    np.testing.assert_array_equal(np.concatenate([values for _, values in blocks]), whole)


@pytest.mark.parametrize("rows", [2, 7, 8, 9, 33, 64])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    weight = random_weight(1, 96, 128, 32, zeros=True, perm=True)
    x = np.random.default_rng(2).standard_normal((rows, 128), np.float32)
    together = linear(x, weight)
    for row in range(rows):
        np.testing.assert_array_equal(linear(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_op_takes_one(dtype: DType, bits: int) -> None:
    """Every op gives the same bits with a quantised weight as with the matrix of the same float32 elements."""
    ops, random = NumpyOps(dtype), np.random.default_rng(3)
    width, heads, kv_heads, head_dim, inner, vocab, rows = 64, 2, 1, 32, 64, 40, 3

    def both(n: int, k: int) -> tuple[QuantizedWeight, F32]:
        weight = random_weight(n, n, k, 32, zeros=bits == 4, bits=bits)
        return weight, np.concatenate([values for _, values in quantized.dequantized(weight)])

    def values(*shape: int) -> F32:
        return round_to(random.standard_normal(shape, np.float32), dtype)

    x, norm, gated, rope = values(rows, width), values(width), values(rows, inner), values(2, 8, head_dim // 2)
    step = Rows(np.arange(rows), np.arange(rows), np.zeros(rows, int), np.zeros((1, 1), np.int32), True)
    outputs: list[list[Array]] = [[], []]
    weights = [
        both((heads + 2 * kv_heads) * head_dim, width),
        both(width, inner),
        both(2 * inner, width),
        both(vocab, width),
    ]
    for kind, out in enumerate(outputs):
        qkv, down, gate_up, head = (pair[kind] for pair in weights)
        q = np.zeros((rows, heads * head_dim), np.float32)
        pages = [np.zeros((1, kv_heads, 64, head_dim), np.float32) for _ in range(2)]
        ops.qkv(q, KVPages(*pages), x, QkvWeights(norm, qkv), rope, step, 1e-6)
        added, product = x.copy(), np.zeros((rows, inner), np.float32)
        ops.project_residual(added, gated, down, None, 0.5)
        ops.gate_up(product, x, norm, gate_up, 1e-6)
        logits = np.zeros((rows, vocab), np.float32)
        ops.lm_head(logits, x, norm, head, 1e-6, 4.0)
        out += [q, *pages, added, product, logits]
    for one, other in zip(*outputs, strict=True):
        assert one.any()
        np.testing.assert_array_equal(one, other)


def test_a_wrong_shape_is_named() -> None:
    weight = random_weight(0, 40, 64, 32)
    x, logits = np.zeros((2, 32), np.float32), np.zeros((2, 40), np.float32)
    with pytest.raises(ValueError, match=r"lm_head: weight has shape \(40, 64\)"):
        NumpyOps(DType.FLOAT32).lm_head(logits, x, np.ones(32, np.float32), weight, 1e-6, 1.0)
