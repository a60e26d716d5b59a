"""lightning_heads and lightning_prefill against a recurrence in float64: partial blocks, borders of chunks, padding,
equal bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lightning_cases import DTYPES, GUARD, LightningCase

from cpmrt.config.layers import LIGHTNING_BLOCK as BLOCK
from cpmrt.dtypes import DType
from cpmrt.ops import OPS

pytestmark = pytest.mark.gpu

SHAPES = [(3, 128, False), (2, 64, False), (5, 64, True), (32, 128, False)]


def prefill(
    cuda: Any, case: LightningCase, states: Any, start: int, end: int, *, bucket: int = 0, pdl: bool = False
) -> Any:
    """Return the outputs of the tokens start .. end - 1 as one chunk, in a bucket of `bucket` rows (0: as many as
    tokens)."""
    count, rows = end - start, max(bucket, end - start)
    constants = {"HEAD_DIM": case.head_dim}
    padded = np.zeros((rows, 3 * case.width), np.float32)
    padded[:count] = case.qkv[start:end]
    positions, slots = np.full(rows, 10**6, np.int32), np.full(rows, -1, np.int32)
    positions[:count], slots[:count] = case.positions[start:end], case.slots[start:end]
    q_norm, k_norm, rope, decay = case.heads(cuda)
    poison = np.full(rows * case.width + 2 * GUARD, np.nan, np.float32)
    qkv, out = cuda.array(padded, case.dtype), cuda.array(poison, case.dtype)
    sizes = np.int32(rows), np.int32(case.num_heads), np.int32(case.context), np.float32(case.eps)
    cuda.kernel("lightning_heads", case.dtype, **constants)(
        -(-rows * 2 * case.num_heads // 8), 256, qkv, q_norm, k_norm, rope, cuda.array(positions), cuda.array(slots),
        *sizes, pdl=pdl,
    )  # fmt: skip
    chunk = cuda.array(np.array([case.slots[start], start, count, 0], np.int32))
    words = 2 * BLOCK * (2 * case.head_dim + 64) + 2 * BLOCK * BLOCK
    cuda.kernel("lightning_prefill", case.dtype, **constants)(
        (case.head_dim // 64, case.num_heads), 128, out[GUARD:], states, qkv, decay, chunk, np.int32(case.num_heads),
        smem=2 * words + 4 * (BLOCK + 1), pdl=pdl,
    )  # fmt: skip
    found = cuda.numpy(out, case.dtype)
    assert np.isnan(found[:GUARD]).all() and np.isnan(found[GUARD + count * case.width :]).all(), "wrote outside out"
    return found[GUARD : GUARD + count * case.width].reshape(count, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "is_plain"), SHAPES)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_prompt(cuda: Any, dtype: DType, heads: int, head_dim: int, is_plain: bool, count: int) -> None:
    case = LightningCase(dtype, heads, head_dim, count, is_plain=is_plain)
    states, expected = cuda.array(case.states), case.expected()
    found = prefill(cuda, case, states, 0, count)
    assert case.distance(found, expected.out) < OPS["lightning_prefill"].tolerance[dtype]
    rows = np.linalg.norm(found - expected.out, axis=1) / np.linalg.norm(expected.out, axis=1)
    assert rows.max() < 3 * OPS["lightning_prefill"].tolerance[dtype]
    case.check_states(cuda.numpy(states), expected.state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("borders", [(0, 64, 330), (0, 128, 192, 330), (0, 320, 330)], ids=str)
def test_where_a_prompt_is_cut_and_padding_change_no_bit(
    cuda: Any, dtype: DType, head_dim: int, borders: tuple[int, ...]
) -> None:
    case = LightningCase(dtype, 3, head_dim, 330)
    whole, cut = cuda.array(case.states), cuda.array(case.states)
    expected = prefill(cuda, case, whole, 0, 330, bucket=512)
    parts = [
        prefill(cuda, case, cut, start, end, bucket=bucket, pdl=bucket == 0)
        for start, end, bucket in zip(borders[:-1], borders[1:], (0, 400, 0, 400), strict=False)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    np.testing.assert_array_equal(cuda.numpy(cut), cuda.numpy(whole))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_large_and_small_states(cuda: Any, dtype: DType, size: float) -> None:
    """With fp16 a state may exceed the largest fp16 number: only outputs must be in the range of fp16."""
    case = LightningCase(dtype, 2, 128, 100)
    case.states *= np.float32(size * 30 if dtype is DType.FLOAT16 and size > 1 else size)
    case.q_norm /= 64 if size > 1 else 1
    states, expected = cuda.array(case.states), case.expected()
    found = prefill(cuda, case, states, 0, 100)
    assert case.distance(found, expected.out) < OPS["lightning_prefill"].tolerance[dtype]
    case.check_states(cuda.numpy(states), expected.state)


def test_an_empty_chunk_changes_nothing(cuda: Any) -> None:
    """An empty chunk changes no states: the kernel runs with one before any prompt, when a graph is captured."""
    case = LightningCase(DType.BFLOAT16, 2, 64, 64)
    states, case.slots[:] = cuda.array(case.states), -1
    kernel = cuda.kernel("lightning_prefill", case.dtype, HEAD_DIM=64)
    for chunk in ((0, 0, 0, 0), (-1, 0, 64, 0)):
        given = cuda.array(np.zeros((64, 3 * case.width), np.float32), case.dtype)
        place = cuda.array(np.array(chunk, np.int32))
        kernel((1, 2), 128, given, states, given, cuda.array(case.decay), place, np.int32(2), smem=66_000)
    np.testing.assert_array_equal(cuda.numpy(states), case.states)
