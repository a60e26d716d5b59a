"""head_rows: its normalised rows give the logits of linear_head bit for bit, and their lengths are never too small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from linear_cases import EPS, bits, relative_error
from screened_head_cases import random_head, rows_for

from cpmrt.cuda.ops.linear import launch_linear
from cpmrt.dtypes import DType, to_float32
from cpmrt.reference.ops import rms_norm

pytestmark = pytest.mark.gpu
DTYPES = [DType.BFLOAT16, DType.FLOAT16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ["small", "demo", "odd"])
@pytest.mark.parametrize("spread", [1e-3, 1.7, 300.0])
def test_rows_and_lengths(cuda: Any, name: str, dtype: DType, spread: float) -> None:
    head = random_head(cuda, name, dtype)
    x = rows_for(head, 8, seed=3) * np.float32(spread)
    whole = head.whole(x)
    head.rescored(x, [None] * 8)
    made = head.arrays["head_rows"][:8]
    rows = to_float32(cuda.numpy(made).view(dtype.storage), dtype)
    norm = to_float32(cuda.numpy(head.norm), dtype)
    assert relative_error(rows, rms_norm(head.rounded(x), norm, EPS)) < (4e-3 if dtype is DType.BFLOAT16 else 6e-4)
    logits = cuda.array(np.zeros((8, head.vocab), np.float32))
    cuda.cupy.cuda.Device().synchronize()
    launch_linear(cuda.launcher(dtype), head.product(logits, made, None), head.head, cuda.device)
    assert np.array_equal(bits(cuda.numpy(logits)), bits(whole))
    lengths, exact = cuda.numpy(head.arrays["head_norms"])[:8], np.linalg.norm(rows.astype(np.float64), axis=1)
    assert (lengths >= exact).all() and (lengths < exact * 1.01 + 1e-6).all()
