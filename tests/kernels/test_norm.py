"""rms_norm against the NumPy op: widths around the block's, small and large values, guards, row invariance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType, round_to
from cpmrt.ops import OPS
from cpmrt.reference.ops import rms_norm

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
GUARD, EPS = 256, 1e-5


def run(cuda: Any, dtype: DType, x: Any, weight: Any, pdl: bool = False) -> Any:
    """Return the normalised rows; the guards around them must stay poison."""
    out = cuda.array(np.full(x.size + 2 * GUARD, np.nan, np.float32), dtype)
    kernel = cuda.kernel("rms_norm", dtype, HIDDEN=x.shape[1])
    kernel(len(x), 256, out[GUARD:], cuda.array(x, dtype), cuda.array(weight, dtype), np.float32(EPS), pdl=pdl)
    result = cuda.numpy(out, dtype)
    assert np.isnan(result[:GUARD]).all() and np.isnan(result[GUARD + x.size :]).all(), "wrote outside out"
    return result[GUARD : GUARD + x.size].reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 256, 1000, 2048, 2304, 4096, 5120])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 60.0])
def test_rows_are_the_oracles(cuda: Any, dtype: DType, hidden: int, spread: float) -> None:
    rng = np.random.default_rng(hidden)
    x = round_to(rng.standard_normal((70, hidden), np.float32) * np.float32(spread), dtype)
    x[3] = 0
    weight = round_to(1 + 0.25 * rng.standard_normal(hidden).astype(np.float32), dtype)
    expected = round_to(rms_norm(x, weight, EPS), dtype)
    out = run(cuda, dtype, x, weight)
    assert np.linalg.norm(out - expected) <= OPS["gate_up"].tolerance[dtype] * np.linalg.norm(expected)
    assert not out[3].any()
    np.testing.assert_array_equal(run(cuda, dtype, x, weight, pdl=True), out)
    for count in (1, 5, 64):
        np.testing.assert_array_equal(run(cuda, dtype, x[:count], weight), out[:count])
