"""residual_add against the NumPy op: with and without bias, guards, row invariance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType, round_to
from cpmrt.ops import OPS

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
GUARD = 256


def run(cuda: Any, dtype: DType, x: Any, y: Any, bias: Any, scale: float, pdl: bool = False) -> Any:
    """Return x after the addition; the guards around it must stay poison."""
    poison = np.full(GUARD, np.nan, np.float32)
    buffer = cuda.array(np.concatenate([poison, x.ravel(), poison]), dtype)
    kernel = cuda.kernel("residual_add", dtype, HIDDEN=x.shape[1])
    inputs = cuda.array(y, dtype), None if bias is None else cuda.array(bias, dtype)
    kernel(-(-x.size // 2048), 256, buffer[GUARD:], *inputs, np.int32(len(x)), np.float32(scale), pdl=pdl)
    result = cuda.numpy(buffer, dtype)
    assert np.isnan(result[:GUARD]).all() and np.isnan(result[-GUARD:]).all(), "wrote outside x"
    return result[GUARD:-GUARD].reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 200, 1024, 4096])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.2475])
def test_rows_are_the_oracles(cuda: Any, dtype: DType, hidden: int, has_bias: bool, scale: float) -> None:
    rng = np.random.default_rng(hidden)
    x, y = (round_to(rng.standard_normal((37, hidden), np.float32), dtype) for _ in range(2))
    bias = round_to(rng.standard_normal(hidden, np.float32), dtype) if has_bias else None
    expected = round_to(x + np.float32(scale) * (y if bias is None else y + bias), dtype)
    out = run(cuda, dtype, x, y, bias, scale)
    assert np.linalg.norm(out - expected) <= OPS["project_residual"].tolerance[dtype] * np.linalg.norm(expected)
    np.testing.assert_array_equal(run(cuda, dtype, x, y, bias, scale, pdl=True), out)
    for count in (1, 5, 32):
        np.testing.assert_array_equal(run(cuda, dtype, x[:count], y[:count], bias, scale), out[:count])
