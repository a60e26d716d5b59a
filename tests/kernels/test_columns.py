"""copy_columns and clear against the NumPy ops, word for word."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType, from_float32
from cpmrt.reference.ops import NumpyOps

pytestmark = pytest.mark.gpu

GUARD = 256


def guarded(cuda: Any, values: Any) -> tuple[Any, Any]:
    """Return bf16 words between guards: the whole buffer, and its part that a kernel gets."""
    guard = np.full(GUARD, np.nan, np.float32)
    whole = cuda.array(np.concatenate([guard, values.ravel(), guard]), DType.BFLOAT16)
    return whole, whole[GUARD:]


def inside(cuda: Any, whole: Any, shape: tuple[int, ...]) -> Any:
    result = cuda.numpy(whole, DType.BFLOAT16)
    assert np.isnan(result[:GUARD]).all() and np.isnan(result[-GUARD:]).all(), "wrote outside out"
    return result[GUARD:-GUARD].reshape(shape)


@pytest.mark.parametrize("num_rows", [1, 5, 64, 300])
@pytest.mark.parametrize(("columns", "out_columns"), [(8, 8), (64, 192), (1024, 3072), (1000, 1016)])
def test_columns_go_where_they_belong(cuda: Any, num_rows: int, columns: int, out_columns: int) -> None:
    rng = np.random.default_rng(num_rows)
    before, x = (rng.integers(-99, 99, (num_rows, width)).astype(np.float32) for width in (out_columns, columns))
    kernel, source = cuda.kernel("copy_columns", DType.BFLOAT16), cuda.array(x, DType.BFLOAT16)
    for first in {0, 8 * ((out_columns - columns) // 16), out_columns - columns}:
        expected = before.copy()
        NumpyOps(DType.BFLOAT16).copy_columns(expected, x, first)
        whole, out = guarded(cuda, before)
        counts = (np.int32(count) for count in (first, out_columns, columns, num_rows))
        kernel(-(-x.size // 2048), 256, out, source, *counts, pdl=True)
        np.testing.assert_array_equal(inside(cuda, whole, before.shape), expected)


@pytest.mark.parametrize("shape", [(1, 8), (3, 1000), (300, 4096)])
def test_clear(cuda: Any, shape: tuple[int, int]) -> None:
    whole, out = guarded(cuda, np.full(shape, -7, np.float32))
    count = shape[0] * shape[1] // 8
    cuda.kernel("clear", DType.BFLOAT16)(-(-count // 256), 256, out, np.int32(count), pdl=True)
    zeros = inside(cuda, whole, shape)
    assert not from_float32(np.ascontiguousarray(zeros), DType.BFLOAT16).any(), "zeros without a sign"
