"""join against the NumPy op and, bit for bit, against rms_norm: widths, missing norms, guards, row invariance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType, round_to
from cpmrt.ops import OPS
from cpmrt.reference.ops import NumpyOps

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
GUARD, EPS = 256, 1e-5


def run(cuda: Any, dtype: DType, halves: list[Any], norms: list[Any], pdl: bool = False) -> Any:
    """Return the joined rows; the guards around them must stay poison."""
    (rows, a_columns), (_, b_columns) = (half.shape for half in halves)
    size = rows * (a_columns + b_columns)
    out = cuda.array(np.full(size + 2 * GUARD, np.nan, np.float32), dtype)
    kernel = cuda.kernel("join", dtype, A_COLUMNS=a_columns, B_COLUMNS=b_columns)
    pairs = zip(halves, norms, strict=True)
    inputs = [None if values is None else cuda.array(values, dtype) for pair in pairs for values in pair]
    kernel((rows, 2), 256, out[GUARD:], *inputs, np.float32(EPS), pdl=pdl)
    result = cuda.numpy(out, dtype)
    assert np.isnan(result[:GUARD]).all() and np.isnan(result[GUARD + size :]).all(), "wrote outside out"
    return result[GUARD : GUARD + size].reshape(rows, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("a_columns", "b_columns"), [(64, 64), (1024, 1024), (4096, 4096), (1000, 5120), (8, 12288)])
@pytest.mark.parametrize("has_norm", [(True, True), (False, True), (True, False), (False, False)], ids=str)
def test_halves_are_the_oracles(
    cuda: Any, dtype: DType, a_columns: int, b_columns: int, has_norm: tuple[bool, bool]
) -> None:
    rng = np.random.default_rng(a_columns + b_columns)
    widths = a_columns, b_columns
    halves = [round_to(rng.standard_normal((70, width), np.float32) * np.float32(3), dtype) for width in widths]
    norms = [
        round_to(1 + 0.25 * rng.standard_normal(width).astype(np.float32), dtype) if wanted else None
        for width, wanted in zip(widths, has_norm, strict=True)
    ]
    expected = np.empty((70, sum(widths)), np.float32)
    NumpyOps(dtype).join(expected, halves[0], norms[0], halves[1], norms[1], EPS)
    out = run(cuda, dtype, halves, norms)
    assert np.linalg.norm(out - expected) <= OPS["join"].tolerance[dtype] * np.linalg.norm(expected)
    for part, half, norm in ((out[:, :a_columns], halves[0], norms[0]), (out[:, a_columns:], halves[1], norms[1])):
        np.testing.assert_array_equal(part, half if norm is None else normalised(cuda, dtype, half, norm))
    np.testing.assert_array_equal(run(cuda, dtype, halves, norms, pdl=True), out)
    for count in (1, 5):
        np.testing.assert_array_equal(run(cuda, dtype, [half[:count] for half in halves], norms), out[:count])


def normalised(cuda: Any, dtype: DType, x: Any, norm: Any) -> Any:
    out = cuda.array(np.full_like(x, np.nan), dtype)
    kernel = cuda.kernel("rms_norm", dtype, HIDDEN=x.shape[1])
    kernel(len(x), 256, out, cuda.array(x, dtype), cuda.array(norm, dtype), np.float32(EPS))
    return cuda.numpy(out, dtype)
