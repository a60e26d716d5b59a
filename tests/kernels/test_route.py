"""route.cu against the NumPy op: every number of experts, ties, padding, NaN and infinities, row invariance.

A step of one row is routed by gate_up_row.cu: see test_gate_up_row.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expert_cases import DTYPES, Case, OnDevice, Shape, no_routing
from reference.operands import EPS
from slow_writer import SlowWriter

from cpmrt.cuda.ops.expert_plan import route_warps
from cpmrt.dtypes import DType
from cpmrt.ops import Routing, Rows

gpu = pytest.mark.gpu
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
SIZES = [(64, 3, 1), (128, 8, 2), (192, 5, 5), (2304, 8, 2), (4160, 32, 8), (5000 // 8 * 8, 1, 1)]


def run(cuda: Any, case: Case, slots: Any = None, *, pdl: bool = False) -> tuple[Any, Any, Any]:
    """Run the op and return experts, shares and normalised rows, which were all poison before."""
    device, count = OnDevice(cuda, case), case.num_rows
    slots = np.zeros(count, np.int32) if slots is None else slots
    empty = no_routing(count, case.shape.top)
    routing = Routing(cuda.array(empty.experts), cuda.array(empty.shares))
    on_device = Rows(None, None, cuda.array(slots), None, is_prefill=False)
    ops = device.ops(pdl=pdl)
    ops.route(routing, cuda.array(case.x, case.dtype), device.norm, device.router, EPS, on_device)
    return cuda.numpy(routing.experts), cuda.numpy(routing.shares), cuda.numpy(device.arrays["normed"], case.dtype)


def scores_of(case: Case, normed: Any) -> Any:
    """Return the router's scores of normalised rows, in float64."""
    return normed.astype(np.float64) @ case.router.astype(np.float64).T


@gpu
@BY_DTYPE
@pytest.mark.parametrize(("hidden", "experts", "top"), SIZES)
def test_rows_are_the_oracles(cuda: Any, dtype: DType, hidden: int, experts: int, top: int) -> None:
    case = Case(Shape(hidden, 64, experts, top), dtype, 70)
    chosen, shares, normed = run(cuda, case)
    wanted = case.ops._normalised(case.x, case.norm, EPS)
    assert np.linalg.norm(normed - wanted) < 1e-3 * np.linalg.norm(wanted)
    scores = scores_of(case, normed)  # scores of the normalised rows that the kernel stored
    for row, found in enumerate(chosen):
        assert (np.diff(found) > 0).all() and found[0] >= 0 and found[-1] < experts
        others = np.delete(scores[row], found)
        assert others.size == 0 or scores[row, found].min() >= others.max() - 1e-4
        weights = np.exp(scores[row, found] - scores[row, found].max())
        np.testing.assert_allclose(shares[row], weights / weights.sum(), rtol=1e-4)
    again = run(cuda, case, pdl=True)
    assert all(np.array_equal(one, other) for one, other in zip(again, (chosen, shares, normed), strict=True))
    for count in (2, 8, 64):
        fewer = Case(case.shape, dtype, 70)
        fewer.x, fewer.num_rows = case.x[:count], count
        found = run(cuda, fewer)
        assert np.array_equal(found[0], chosen[:count]) and np.array_equal(found[1], shares[:count])


@gpu
@BY_DTYPE
def test_equal_scores_go_to_the_lower_index(cuda: Any, dtype: DType) -> None:
    """Equal scores go to the expert of the lower index: experts with the same router row have the same score, to the
    bit."""
    case = Case(Shape(128, 64, 8, 3), dtype, 64)
    case.router[[1, 2, 6]] = case.router[0]
    case.router[[5, 7]] = case.router[3]
    chosen, shares, normed = run(cuda, case)
    scores = scores_of(case, normed)
    for row, found in enumerate(chosen):
        wanted = sorted(sorted(range(8), key=lambda expert: (-scores[row, expert], expert))[:3])
        assert found.tolist() == wanted
    case.router[:] = 0
    chosen, shares, _ = run(cuda, case)
    assert (chosen == [0, 1, 2]).all()
    np.testing.assert_allclose(shares, 1 / 3, rtol=1e-6)


@gpu
def test_padding_has_no_experts(cuda: Any) -> None:
    case, slots = Case(Shape(128, 64, 8, 2), DType.BFLOAT16, 9), np.array([0, -1, 3, -1, -1, 2, 0, 0, -1], np.int32)
    chosen, _, _ = run(cuda, case, slots)
    assert ((chosen < 0) == (slots < 0)[:, None]).all()


@gpu
@BY_DTYPE
def test_scores_that_are_no_numbers_choose_experts_that_exist(cuda: Any, dtype: DType) -> None:
    case = Case(Shape(128, 64, 8, 2), dtype, 4)
    case.x[0] = np.nan
    case.router[:6] = np.nan
    chosen, _, _ = run(cuda, case)
    assert chosen.tolist() == [[0, 1], [6, 7], [6, 7], [6, 7]]


@gpu
@pytest.mark.parametrize("count", [2, 64])
def test_rows_are_those_that_the_kernel_before_has_written(cuda: Any, count: int) -> None:
    """Rows and slots, which an earlier kernel writes, are read after the wait; norm and router are loaded before it."""
    case = Case(Shape(2304, 64, 8, 2), DType.BFLOAT16, count)
    device, expected = OnDevice(cuda, case), run(cuda, case)
    after = [cuda.array(case.x, case.dtype), cuda.array(np.zeros(count, np.int32))]
    stale = [cuda.array(np.full_like(case.x, np.nan), case.dtype), cuda.array(np.full(count, -1, np.int32))]
    x, slots = (array.copy() for array in stale)
    writer = SlowWriter(cuda, [x, slots], stale, after)
    for _ in range(3):
        empty = no_routing(count, case.shape.top)
        routing = Routing(cuda.array(empty.experts), cuda.array(empty.shares))
        rows = Rows(None, None, slots, None, is_prefill=False)
        writer.launch()
        device.ops(pdl=True).route(routing, x, device.norm, device.router, EPS, rows)
        assert np.array_equal(cuda.numpy(routing.experts), expected[0])
        assert np.array_equal(cuda.numpy(routing.shares), expected[1])
        assert np.array_equal(cuda.numpy(device.arrays["normed"], case.dtype), expected[2])


def test_warps_of_a_row() -> None:
    """The warps of a row cover it, none of them is idle in every turn, and there are no more turns than with twelve
    warps."""
    assert [route_warps(hidden) for hidden in (64, 256, 2304, 3072, 4096, 4160)] == [1, 1, 9, 12, 8, 9]
    for hidden in range(8, 9000, 8):
        warps, pieces = route_warps(hidden), hidden // 8
        turns = -(-pieces // (32 * warps))
        assert 1 <= warps <= 12 and turns == -(-pieces // 384) and (warps - 1) * 32 * turns < pieces
