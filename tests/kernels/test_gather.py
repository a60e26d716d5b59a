"""gather_columns against NumPy: columns in any order, nothing stored outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType

GUARD = 64


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (3, 128), (130, 2056), (65, 16384)], ids=str)
def test_columns_in_another_order(cuda: Any, shape: tuple[int, int], pdl: bool) -> None:
    random = np.random.default_rng(shape[1])
    words, order = random.integers(0, 1 << 16, shape, np.uint16), random.permutation(shape[1]).astype(np.int32)
    out = cuda.array(np.full(words.size + 2 * GUARD, 0x7FFF, np.uint16))
    gather = cuda.kernel("gather_columns", DType.BFLOAT16)
    x, permutation = cuda.array(words), cuda.array(order)
    gather((-(-shape[1] // 2048), shape[0]), 256, out[GUARD:], x, permutation, np.int32(shape[1]), pdl=pdl)
    found = cuda.numpy(out)
    assert np.array_equal(found[GUARD:-GUARD].reshape(shape), words[:, order])
    assert (found[:GUARD] == 0x7FFF).all() and (found[-GUARD:] == 0x7FFF).all()
