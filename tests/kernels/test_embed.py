"""embed against the NumPy op: scale, padding rows, guards, row invariance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType, round_to
from cpmrt.reference.ops import NumpyOps

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
GUARD, VOCAB = 256, 300


def run(cuda: Any, dtype: DType, table: Any, token_ids: Any, slots: Any, scale: float, pdl: bool = False) -> Any:
    """Return the kernel's rows; the guards around them must stay poison."""
    hidden, size = table.shape[1], len(token_ids) * table.shape[1]
    out = cuda.array(np.full(size + 2 * GUARD, np.nan, np.float32), dtype)
    kernel = cuda.kernel("embed", dtype, HIDDEN=hidden)
    rows = (cuda.array(np.asarray(token_ids, np.int32)), cuda.array(np.asarray(slots, np.int32)))
    kernel(len(token_ids), 128, out[GUARD:], *rows, cuda.array(table, dtype), np.float32(scale), pdl=pdl)
    result = cuda.numpy(out, dtype)
    assert np.isnan(result[:GUARD]).all() and np.isnan(result[GUARD + size :]).all(), "wrote outside x"
    return result[GUARD : GUARD + size].reshape(-1, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [64, 192, 1024, 4096])
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_rows_are_the_oracles(cuda: Any, dtype: DType, hidden: int, scale: float) -> None:
    rng = np.random.default_rng(hidden)
    table = round_to(rng.standard_normal((VOCAB, hidden), np.float32), dtype)
    tokens = rng.integers(0, VOCAB, 70)
    tokens[:2] = 0, VOCAB - 1
    expected = np.empty((70, hidden), np.float32)
    NumpyOps(dtype).embed(expected, tokens, table, scale)
    for pdl in (False, True):
        np.testing.assert_array_equal(run(cuda, dtype, table, tokens, np.zeros(70), scale, pdl), expected)
    for count in (1, 2, 5, 31, 64):
        np.testing.assert_array_equal(run(cuda, dtype, table, tokens[:count], np.zeros(count), scale), expected[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_rows_become_zero_and_read_nothing(cuda: Any, dtype: DType) -> None:
    table = np.full((VOCAB, 64), 3.0, np.float32)
    x = run(cuda, dtype, table, [7, 2**31 - 1, -(2**31), 8], [0, -1, -1, 5], 2.0)
    np.testing.assert_array_equal(x, np.repeat(np.array([[6.0], [0.0], [0.0], [6.0]], np.float32), 64, axis=1))
