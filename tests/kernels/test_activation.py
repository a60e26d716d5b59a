"""silu_mul against the NumPy op: odd widths, extreme gates, guards, row invariance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.cuda.ops.linear import float_bits
from cpmrt.dtypes import DType, round_to
from cpmrt.ops import OPS
from cpmrt.reference.ops import gated, silu

pytestmark = pytest.mark.gpu

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
GUARD = 256


def run(cuda: Any, dtype: DType, gate_up: Any, pdl: bool = False, **constants: int) -> Any:
    """Return the kernel's activation(gate) * up; the guards around the output must stay poison."""
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    size = rows * inner
    out = cuda.array(np.full(size + 2 * GUARD, np.nan, np.float32), dtype)
    kernel = cuda.kernel("silu_mul", dtype, INTERMEDIATE=inner, **constants)
    kernel(-(-size // 2048), 256, out[GUARD:], cuda.array(gate_up, dtype), np.int32(rows), pdl=pdl)
    result = cuda.numpy(out, dtype)
    assert np.isnan(result[:GUARD]).all() and np.isnan(result[GUARD + size :]).all(), "wrote outside out"
    return result[GUARD : GUARD + size].reshape(rows, inner)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", [0.0, 0.01, 2.5])
def test_a_fatrelu_keeps_what_is_above_its_threshold(cuda: Any, dtype: DType, threshold: float) -> None:
    gate_up = round_to(np.random.default_rng(3).standard_normal((37, 400), np.float32) * 2, dtype)
    gate_up[0, :3], gate_up[0, 200:203] = (*round_to(np.full(1, threshold, np.float32), dtype), -1, np.nan), np.nan
    expected = round_to(gated(gate_up[:, :200], gate_up[:, 200:], threshold), dtype)
    np.testing.assert_array_equal(run(cuda, dtype, gate_up, FATRELU=float_bits(threshold)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [64, 200, 640, 4096])
def test_rows_are_the_oracles(cuda: Any, dtype: DType, inner: int) -> None:
    gate_up = round_to(np.random.default_rng(inner).standard_normal((37, 2 * inner), np.float32) * 4, dtype)
    gate, up = gate_up[:, :inner], gate_up[:, inner:]
    expected = round_to(silu(gate) * up, dtype)
    out = run(cuda, dtype, gate_up)
    assert np.linalg.norm(out - expected) <= OPS["gate_up"].tolerance[dtype] * np.linalg.norm(expected)
    np.testing.assert_array_equal(run(cuda, dtype, gate_up, pdl=True), out)
    for count in (1, 5, 32):
        np.testing.assert_array_equal(run(cuda, dtype, gate_up[:count]), out[:count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_every_size_stay_finite(cuda: Any, dtype: DType) -> None:
    gates = np.array([-6e4, -1e3, -100, -88.5, -87.5, -20, -1e-6, 0, 1e-6, 20, 88, 100, 1e3, 6e4, 1, -1], np.float32)
    gate_up = round_to(np.tile(np.stack([gates, np.ones(16, np.float32)]).reshape(1, -1), (3, 1)), dtype)
    out = run(cuda, dtype, gate_up)
    np.testing.assert_allclose(out, round_to(silu(gate_up[:, :16]), dtype), rtol=1e-2, atol=1e-6)
