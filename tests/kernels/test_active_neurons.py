"""active_gate_up and active_down against the NumPy ops: any share of open gates, odd sizes, row invariance, guards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from linear_cases import bits, normals, relative_error

from cpmrt.cuda.ops.active_neurons import TransposedWeight, active_down, active_gate_up
from cpmrt.cuda.ops.linear import float_bits
from cpmrt.dtypes import DType, from_float32, round_to, to_float32
from cpmrt.ops import OPS
from cpmrt.reference.ops import NumpyOps

pytestmark = pytest.mark.gpu

EPS, SCALE = 1e-5, 0.19
DTYPES = pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=lambda dtype: dtype.label)
# hidden, intermediate: MiniCPM-S-1B, MiniCPM-2B's sizes, sizes that fill no lane or block, more than a mask of neurons
SIZES = pytest.mark.parametrize(
    ("hidden", "inner"), [(1536, 3840), (2304, 5760), (128, 192), (208, 200), (16, 8), (64, 9000)]
)
NUM_ROWS = (1, 2, 3, 4, 5, 8, 9, 17, 33, 63)


@dataclass
class Mlp:
    """The operands of 64 rows, as float32 that holds storage values."""

    x: Any
    norm: Any
    gate_up: Any
    down: Any

    @classmethod
    def of(cls, dtype: DType, hidden: int, inner: int) -> Mlp:
        normal = normals(np.random.default_rng(hidden + inner), dtype)
        return cls(
            normal(64, hidden, spread=1.7), round_to(normal(hidden, spread=0.3) + 1, dtype),
            normal(2 * inner, hidden, spread=hidden**-0.5), normal(hidden, inner, spread=inner**-0.5),
        )  # fmt: skip


def poisoned(cuda: Any, dtype: DType, rows: int, columns: int) -> Any:
    return cuda.array(np.full((rows, columns), np.nan, np.float32), dtype)


def gates(cuda: Any, dtype: DType, mlp: Mlp, num_rows: int, threshold: float, pdl: bool = False) -> Any:
    """The words that active_gate_up writes; those of a row behind them stay poison."""
    out = poisoned(cuda, dtype, num_rows + 1, len(mlp.gate_up) // 2)
    operands = [cuda.array(values, dtype) for values in (mlp.x, mlp.norm, mlp.gate_up)]
    launch = cuda.launcher(dtype, pdl=pdl)
    active_gate_up(launch, out[:num_rows], operands[0][:num_rows], *operands[1:], EPS, float_bits(threshold))
    words = cuda.numpy(out)
    assert np.isnan(to_float32(words[num_rows], dtype)).all()
    return words[:num_rows]


def downs(cuda: Any, dtype: DType, mlp: Mlp, inner: Any, num_rows: int, pdl: bool = False) -> Any:
    """The words that active_down makes of x."""
    x = cuda.array(np.concatenate([mlp.x[:num_rows], np.full_like(mlp.x[:1], np.nan)]), dtype)
    weight = TransposedWeight(cuda.array(mlp.down.T.copy(), dtype))
    held = cuda.array(inner[:num_rows], dtype)
    active_down(cuda.launcher(dtype, pdl=pdl), x[:num_rows], held, weight, SCALE)
    words = cuda.numpy(x)
    assert np.isnan(to_float32(words[num_rows], dtype)).all()
    return words[:num_rows]


@DTYPES
@SIZES
@pytest.mark.parametrize("threshold", [0.0, 1.2, 100.0])
def test_gates_against_the_op_and_bitwise_for_every_number_of_rows(
    cuda: Any, dtype: DType, hidden: int, inner: int, threshold: float
) -> None:
    mlp = Mlp.of(dtype, hidden, inner)
    expected = np.empty((64, inner), np.float32)
    NumpyOps(dtype).gate_up(expected, mlp.x, mlp.norm, mlp.gate_up, EPS, fatrelu=threshold)
    widest = gates(cuda, dtype, mlp, 64, threshold)
    values = to_float32(widest, dtype)
    if threshold == 100.0:
        assert not values.any()
    else:
        assert relative_error(values, expected) < OPS["gate_up"].tolerance[dtype]
    for num_rows in NUM_ROWS:
        alone = gates(cuda, dtype, mlp, num_rows, threshold, pdl=num_rows % 2 == 0)
        np.testing.assert_array_equal(bits(alone), bits(widest[:num_rows]), f"{num_rows} rows")


@DTYPES
@SIZES
@pytest.mark.parametrize("share", [0.0, 0.12, 1.0])
def test_down_against_the_op_and_bitwise_for_every_number_of_rows(
    cuda: Any, dtype: DType, hidden: int, inner: int, share: float
) -> None:
    mlp, rng = Mlp.of(dtype, hidden, inner), np.random.default_rng(7)
    values = normals(rng, dtype)(64, inner) * (rng.random((64, inner)) < share)
    values[0] = values[1] = 0
    values[1, inner - 1] = 1
    expected = mlp.x.copy()
    NumpyOps(dtype).project_residual(expected, values, mlp.down, None, SCALE)
    widest = downs(cuda, dtype, mlp, values, 64)
    found = to_float32(widest, dtype)
    np.testing.assert_array_equal(found[0], mlp.x[0])
    assert relative_error(found, expected) < OPS["project_residual"].tolerance[dtype]
    assert relative_error(found - mlp.x, expected - mlp.x) < 4 * OPS["project_residual"].tolerance[dtype] or share == 0
    for num_rows in NUM_ROWS:
        alone = downs(cuda, dtype, mlp, values, num_rows, pdl=num_rows % 2 == 0)
        np.testing.assert_array_equal(bits(alone), bits(widest[:num_rows]), f"{num_rows} rows")


@DTYPES
def test_what_is_not_a_number_is_added_and_what_is_zero_is_not(cuda: Any, dtype: DType) -> None:
    """A weight that no gate asks for may be anything; an inner value that is not finite is no zero."""
    mlp = Mlp.of(dtype, 64, 128)
    values = np.zeros((64, 128), np.float32)
    values[:, 3], values[2, 5], values[4, 6] = 0.5, np.nan, np.inf
    mlp.down[:, 7] = np.nan
    found = to_float32(downs(cuda, dtype, mlp, values, 64), dtype)
    assert np.isfinite(np.delete(found, [2, 4], axis=0)).all()
    assert np.isnan(found[2]).all() and not np.isfinite(found[4]).any()
    mlp.gate_up[3] = 0
    mlp.gate_up[128 + 3] = np.nan
    assert np.isfinite(to_float32(gates(cuda, dtype, mlp, 64, 0.5), dtype)).all()


@DTYPES
def test_a_row_does_not_see_the_others(cuda: Any, dtype: DType) -> None:
    mlp = Mlp.of(dtype, 208, 200)
    before = gates(cuda, dtype, mlp, 12, 0.5)
    mlp.x[1:] = np.nan
    np.testing.assert_array_equal(bits(gates(cuda, dtype, mlp, 12, 0.5)[0]), bits(before[0]))


@DTYPES
def test_sums_of_large_terms_that_cancel_keep_their_order(cuda: Any, dtype: DType) -> None:
    """Rows that other rows' neurons stand between have the bits of those rows alone."""
    mlp, rng = Mlp.of(dtype, 256, 2048), np.random.default_rng(1)
    values = np.zeros((64, 2048), np.float32)
    for row in range(64):
        chosen = rng.choice(2048, 40, replace=False)
        values[row, chosen] = to_float32(from_float32(rng.standard_normal(40, np.float32) * 100, dtype), dtype)
    widest = downs(cuda, dtype, mlp, values, 64)
    for row in (0, 13, 63):
        single = Mlp(mlp.x[row : row + 1], mlp.norm, mlp.gate_up, mlp.down)
        alone = downs(cuda, dtype, single, values[row : row + 1], 1)
        np.testing.assert_array_equal(bits(alone), bits(widest[row : row + 1]))
