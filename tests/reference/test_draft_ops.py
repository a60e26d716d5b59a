"""The ops that only a draft needs: norms, halves and columns of rows, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from reference import brute_force
from reference.operands import EPS, Data, Poisoned, check

from cpmrt.dtypes import DType
from cpmrt.reference.ops import NumpyOps

DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.label)
ROWS = pytest.mark.parametrize("num_rows", [1, 64, 65])


@DTYPES
@ROWS
def test_rms_norm_of_rows(dtype, num_rows):
    data, out = Data(dtype), Poisoned(num_rows, 96)
    x, norm = data(num_rows, 96, scale=3.0), data.norm(96)
    NumpyOps(dtype).rms_norm(out.view, x, norm, EPS)
    check("rms_norm", dtype, out.written(), brute_force.rms_norm(x, norm, EPS))


@DTYPES
@ROWS
@pytest.mark.parametrize("norms", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_join(dtype, num_rows, norms):
    data, out = Data(dtype), Poisoned(num_rows, 64 + 96)
    halves = data(num_rows, 64, scale=2.0), data(num_rows, 96, scale=3.0)
    weights = [data.norm(half.shape[1]) if has_norm else None for half, has_norm in zip(halves, norms, strict=True)]
    NumpyOps(dtype).join(out.view, halves[0], weights[0], halves[1], weights[1], EPS)
    pairs = zip(halves, weights, strict=True)
    expected = [half if norm is None else brute_force.rms_norm(half, norm, EPS) for half, norm in pairs]
    check("join", dtype, out.written(), np.concatenate(expected, axis=1))


@pytest.mark.parametrize("first", [0, 8, 64])
def test_copied_columns_leave_the_others_alone(first):
    data = Data()
    before, x = data(5, 96), data(5, 32)
    out = Poisoned(5, 96, content=before)
    NumpyOps(DType.FLOAT32).copy_columns(out.view, x, first)
    expected = before.copy()
    expected[:, first : first + 32] = x
    assert np.array_equal(out.written(), expected)


def test_clear():
    out = Poisoned(5, 96)
    NumpyOps(DType.FLOAT32).clear(out.view)
    assert not out.written().any()
