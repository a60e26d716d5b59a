"""gate_rows against the NumPy op: widths around the block's, missing norms and gates, large gates, guards."""

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


def run(cuda: Any, dtype: DType, rows: Any, norm: Any, gate: Any, pdl: bool = False) -> Any:
    """Return the rows that the kernel has gated in place; the guards around them must stay poison."""
    whole = np.full(rows.size + 2 * GUARD, np.nan, np.float32)
    whole[GUARD : GUARD + rows.size] = rows.reshape(-1)
    out = cuda.array(whole, dtype)
    norm, gate = (None if array is None else cuda.array(array, dtype) for array in (norm, gate))
    kernel = cuda.kernel("gate_rows", dtype, HIDDEN=rows.shape[1])
    kernel(len(rows), 256, out[GUARD:], norm, gate, np.float32(EPS), pdl=pdl)
    found = cuda.numpy(out, dtype)
    assert np.isnan(found[:GUARD]).all() and np.isnan(found[GUARD + rows.size :]).all(), "wrote outside out"
    return found[GUARD : GUARD + rows.size].reshape(rows.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 192, 1000, 2048, 4096, 8192])
@pytest.mark.parametrize(("has_norm", "has_gate"), [(True, True), (True, False), (False, True)])
def test_rows_are_the_oracles(cuda: Any, dtype: DType, width: int, has_norm: bool, has_gate: bool) -> None:
    rng = np.random.default_rng(width)
    rows, gate = (round_to(rng.standard_normal((33, width), np.float32) * size, dtype) for size in (3, 40))
    rows[4] = 0
    norm = round_to(1 + rng.standard_normal(width, np.float32) / 4, dtype) if has_norm else None
    expected = rows.copy()
    NumpyOps(dtype).gate_rows(expected, norm, gate if has_gate else None, EPS)
    found = run(cuda, dtype, rows, norm, gate if has_gate else None)
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - expected) <= OPS["gate_rows"].tolerance[dtype] * np.linalg.norm(expected)
    alone = run(cuda, dtype, rows[7:8], norm, gate[7:8] if has_gate else None, pdl=True)
    np.testing.assert_array_equal(alone[0], found[7])
