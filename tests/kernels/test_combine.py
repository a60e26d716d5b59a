"""combine.cu against its formula: odd widths, several experts for a row, padding rows, guards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expert_cases import DTYPES

from cpmrt.dtypes import DType, round_to
from cpmrt.ops import OPS

pytestmark = pytest.mark.gpu
GUARD = 256


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize(("hidden", "top"), [(64, 1), (200, 2), (2304, 2), (1000, 8)])
def test_outputs_are_added_by_their_shares(cuda: Any, dtype: DType, hidden: int, top: int) -> None:
    random, rows, scale = np.random.default_rng(hidden), 37, 0.22
    x = round_to(random.standard_normal((rows, hidden), np.float32), dtype)
    y = round_to(random.standard_normal((rows, top, hidden), np.float32) * 3, dtype)
    shares = random.random((rows, top), np.float32)
    chosen = np.zeros((rows, top), np.int32)
    chosen[::5] = -1
    expected = x.astype(np.float64) + scale * (shares[:, :, None].astype(np.float64) * y).sum(1)
    expected[::5] = x[::5]
    for pdl in (False, True):
        stream = np.full(rows * hidden + 2 * GUARD, np.nan, np.float32)
        stream[GUARD:-GUARD] = x.ravel()
        out = cuda.array(stream, dtype)
        kernel = cuda.kernel("combine", dtype, HIDDEN=hidden)
        given = cuda.array(y, dtype), cuda.array(shares), cuda.array(chosen), np.int32(rows), np.int32(top)
        kernel(-(-rows * hidden // 2048), 256, out[GUARD:], *given, np.float32(scale), pdl=pdl)
        found = cuda.numpy(out, dtype)
        assert np.isnan(found[:GUARD]).all() and np.isnan(found[-GUARD:]).all(), "wrote outside x"
        found = found[GUARD:-GUARD].reshape(rows, hidden)
        np.testing.assert_array_equal(found[::5], x[::5])
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error <= OPS["experts_down"].tolerance[dtype]
