"""Sparse attention over keys and values in fp8: compressed keys, decode rows and prefill chunks over chosen blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sparse_cases import SMALL, Slots, SparseDevice, any_choice, expected_attention

from cpmrt.config import SparseConfig
from cpmrt.dtypes import DType
from cpmrt.ops import OPS

pytestmark = pytest.mark.gpu

SHAPES = [(DType.BFLOAT16, 16, 2, 128), (DType.FLOAT16, 8, 2, 64), (DType.BFLOAT16, 4, 1, 96)]
WIDE = SparseConfig(1, 1024, 24, 1500)


def make_slots(dtype: DType, lengths: list[int], group: int, kv_heads: int, head_dim: int) -> Slots:
    slots = Slots(dtype, lengths, group=group, kv_heads=kv_heads, head_dim=head_dim)
    slots.quantise()
    return slots


def assert_close(actual: Any, wanted: Any, dtype: DType) -> None:
    assert np.isfinite(actual).all()
    errors = np.linalg.norm(actual - wanted, axis=1) / np.maximum(np.linalg.norm(wanted, axis=1), 1e-9)
    assert errors.max() <= OPS["decode_attention"].tolerance[dtype], f"row {errors.argmax()}: {errors.max():.2e}"


@pytest.mark.parametrize(("dtype", "group", "kv_heads", "head_dim"), SHAPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 64, 333])
def test_compressed_keys_are_means_of_what_is_stored(
    cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int, chunk: int
) -> None:
    slots = make_slots(dtype, [70, 333], group, kv_heads, head_dim)
    slots.compress([0, 333])
    expected = slots.k1, slots.k2
    slots.compress([0, 0])
    device = SparseDevice(cuda, slots, SMALL, pdl=chunk == 64)
    for start in range(0, 333, chunk):
        positions = np.arange(start, min(start + chunk, 333))
        device.compress(slots.rows([*positions, 10**9], [1] * len(positions) + [-1]))
    device.assert_compressed(*expected)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("dtype", "group", "kv_heads", "head_dim"), SHAPES, ids=str)
def test_rows_match_the_numpy_op(
    cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int, portable: bool
) -> None:
    slots = make_slots(dtype, [700, 450], group, kv_heads, head_dim)
    positions = [0, 100, 254, 255, 256, 257, 319, 320, 321, 447, 5, 448, 640, 699]
    rows = slots.rows(positions, [0, 1, 0, 0, 1, 0, 0, 1, 0, 1, -1, 1, 0, 0])
    q, blocks = slots.queries(len(positions)), any_choice(slots.rng, rows, kv_heads, SMALL)
    out = SparseDevice(cuda, slots, SMALL, portable=portable).attend(q, rows, blocks)
    assert_close(out, expected_attention(slots, q, rows, blocks, SMALL), dtype)


def test_rows_that_leave_nothing_out_have_the_bits_of_dense_attention(cuda: Any) -> None:
    slots = make_slots(DType.BFLOAT16, [2560], 16, 2, 128)
    positions = np.array([0, 63, 64, 1499, 1500, 2047, 2048, 2500, 2559])
    rows = slots.rows(positions, np.zeros(len(positions)))
    q, blocks = slots.queries(len(positions)), any_choice(slots.rng, rows, 2, WIDE)
    device = SparseDevice(cuda, slots, WIDE)
    assert np.array_equal(device.attend(q, rows, blocks), device.attend(q, rows, None))


@pytest.mark.parametrize("fewest_tiled", [0, 10**6], ids=["together", "alone"])
@pytest.mark.parametrize(("dtype", "group", "kv_heads", "head_dim"), SHAPES, ids=str)
@pytest.mark.parametrize(("start", "count"), [(0, 400), (192, 70), (300, 150)])
def test_chunks_match_the_numpy_op(
    cuda: Any, dtype: DType, group: int, kv_heads: int, head_dim: int, start: int, count: int, fewest_tiled: int
) -> None:
    slots = make_slots(dtype, [70, 450], group, kv_heads, head_dim)
    rows = slots.rows([*range(start, start + count), 0, 10**6], [1] * count + [-1, -1], is_prefill=True)
    q, blocks = slots.queries(count + 2), any_choice(slots.rng, rows, kv_heads, SMALL)
    out = SparseDevice(cuda, slots, SMALL, max_rows=512, fewest_tiled=fewest_tiled).attend(q, rows, blocks)
    assert_close(out[:count], expected_attention(slots, q, rows, blocks, SMALL)[:count], dtype)
