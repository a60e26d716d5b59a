"""gate_up_row.cu, the routing and first products of one row: the bits that the row has among others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expert_cases import DTYPES, SCALE, Case, OnDevice, Shape, no_routing
from linear_cases import H200, ORIN, RTX_4090
from reference.operands import EPS
from slow_writer import SlowWriter

from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.expert_plan import bytes_ahead, row_constants
from cpmrt.cuda.ops.linear_packed.layout import PackedLayout, PackedWeight
from cpmrt.dtypes import DType
from cpmrt.ops import OPS, Routing, Rows

SHAPES = {
    "16 bits": Shape(128, 192, 8, 2),
    "odd sizes": Shape(192, 64, 5, 3),
    "one expert": Shape(64, 64, 1, 1),
    "every expert": Shape(128, 128, 4, 4),
    "a router that is not held": Shape(1024, 64, 32, 8),
    "rows of two turns": Shape(4160, 64, 3, 2),
    "4 bits": Shape(256, 384, 8, 2, 128),
    "4 bits, groups of 32, zero points": Shape(384, 640, 6, 2, 32, True),
    "4 bits, zero points": Shape(512, 128, 4, 3, 128, True),
    "4 bits, long rows": Shape(4224, 256, 3, 2, 128),
    "8x2B in 16 bits": Shape(2304, 5760, 4, 2),
    "8x2B in 4 bits": Shape(2304, 5760, 4, 2, 128),
}
ROWS = 12
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
gpu = pytest.mark.gpu


def error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@gpu
@BY_DTYPE
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_alone_is_the_row_in_company(cuda: Any, name: str, dtype: DType) -> None:
    case = Case(SHAPES[name], dtype, ROWS)
    device = OnDevice(cuda, case)
    routing, inner, out = device.layer(np.arange(ROWS))
    for row in range(ROWS):
        for pdl in (False, True):
            alone, own, stream = device.layer([row], pdl=pdl)
            np.testing.assert_array_equal(alone.experts[0], routing.experts[row])
            np.testing.assert_array_equal(alone.shares[0], routing.shares[row])
            np.testing.assert_array_equal(own[0], inner[row])
            np.testing.assert_array_equal(stream[0], out[row])


@gpu
@BY_DTYPE
@pytest.mark.parametrize("name", SHAPES)
def test_one_row_is_the_oracles(cuda: Any, name: str, dtype: DType) -> None:
    """One row's routing matches scores in float64, and its products match the NumPy ops that are given the device's
    routing."""
    case = Case(SHAPES[name], dtype, 1)
    routing, inner, out = OnDevice(cuda, case).layer([0])
    normed = case.ops._normalised(case.x, case.norm, EPS)[0].astype(np.float64)
    scores, chosen = case.router.astype(np.float64) @ normed, routing.experts[0]
    assert (np.diff(chosen) > 0).all() and chosen[0] >= 0 and chosen[-1] < case.shape.experts
    others = np.delete(scores, chosen)
    assert others.size == 0 or scores[chosen].min() >= others.max() - 1e-2
    weights = np.exp(scores[chosen] - scores[chosen].max())
    np.testing.assert_allclose(routing.shares[0], weights / weights.sum(), rtol=2e-2)
    assert error(inner, case.inner(routing, is_prefill=False)) <= OPS["experts_gate_up"].tolerance[dtype]
    wanted = case.x.copy()
    case.ops.experts_down(wanted, inner, case.down, SCALE, routing, is_prefill=False)
    assert error(out - case.x, wanted - case.x) <= OPS["experts_down"].tolerance[dtype]


@gpu
@BY_DTYPE
def test_equal_scores_go_to_the_lower_index(cuda: Any, dtype: DType) -> None:
    case = Case(Shape(128, 64, 8, 3), dtype, 32)
    case.router[[1, 2, 6]] = case.router[0]
    case.router[[5, 7]] = case.router[3]
    device = OnDevice(cuda, case)
    for row in range(32):
        found = set(device.layer([row])[0].experts[0].tolist())
        for equal in ([0, 1, 2, 6], [3, 5, 7]):
            taken = [expert in found for expert in equal]
            assert taken == sorted(taken, reverse=True), (row, found)
    case.router[:] = 0
    routing = OnDevice(cuda, case).layer([5])[0]
    assert routing.experts.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(routing.shares, 1 / 3, rtol=1e-6)


@gpu
@BY_DTYPE
def test_scores_that_are_no_numbers_choose_experts_that_exist(cuda: Any, dtype: DType) -> None:
    case = Case(Shape(128, 64, 8, 2), dtype, 2)
    case.x[0] = np.nan
    case.router[:6] = np.nan
    device = OnDevice(cuda, case)
    assert [device.layer([row])[0].experts.tolist() for row in (0, 1)] == [[[0, 1]], [[6, 7]]]


@gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_row_of_padding_has_no_experts_and_stays(cuda: Any, pdl: bool) -> None:
    case = Case(SHAPES["16 bits"], DType.BFLOAT16, 1)
    routing, inner, out = OnDevice(cuda, case).layer([0], np.array([-1], np.int32), pdl=pdl)
    assert (routing.experts == -1).all() and np.isnan(inner).all()
    np.testing.assert_array_equal(out, case.x)


@gpu
@pytest.mark.parametrize("name", ["8x2B in 16 bits", "8x2B in 4 bits"])
def test_the_row_is_read_when_the_kernel_before_has_written_it(cuda: Any, name: str) -> None:
    """The row and its slot, which an earlier kernel writes, are read after the wait; norm and router are loaded before
    it."""
    case = Case(SHAPES[name], DType.BFLOAT16, 1)
    device = OnDevice(cuda, case)
    expected = device.layer([0])
    stale = [cuda.array(np.full_like(case.x, np.nan), case.dtype), cuda.array(np.full(1, -1, np.int32))]
    x, slots = (array.copy() for array in stale)
    writer = SlowWriter(cuda, [x, slots], stale, [cuda.array(case.x, case.dtype), cuda.array(np.zeros(1, np.int32))])
    ops, step = device.ops(pdl=True), Rows(None, None, slots, None, is_prefill=False)
    for _ in range(3):
        empty = no_routing(1, case.shape.top)
        routing = Routing(cuda.array(empty.experts), cuda.array(empty.shares))
        inner = cuda.array(np.full_like(expected[1], np.nan), case.dtype)
        writer.launch()
        after = ops.route(routing, x, device.norm, device.router, EPS, step)
        ops.experts_gate_up(inner, x, device.norm, device.gate_up, EPS, routing, after)
        assert np.array_equal(cuda.numpy(routing.experts), expected[0].experts)
        assert np.array_equal(cuda.numpy(inner, case.dtype), expected[1])


def stand_in(bits: int, rows: int, in_features: int) -> Any:
    """Return a stand-in for a weight, which has only a shape and a layout."""
    if bits == 16:
        return np.broadcast_to(np.zeros((), np.float16), (rows, in_features))
    return PackedWeight(None, None, PackedLayout("gate_up", rows, in_features, 8, 128, False))


def weight(bits: int, inner: int, experts: int, in_features: int) -> Any:
    return stand_in(bits, 2 * experts * inner, in_features)


@pytest.mark.parametrize("device", [H200, ORIN, RTX_4090], ids=["H200", "Orin", "4090"])
@pytest.mark.parametrize("bits", [16, 4])
def test_every_build_fits_the_shared_memory(device: Device, bits: int) -> None:
    for in_features in (128, 2304, 4096, 16384):
        for experts, top, inner in ((8, 2, 5760), (32, 8, 64), (1, 1, 128)):
            built = row_constants(weight(bits, inner, experts, in_features), experts, top, device)
            assert built.shared_bytes <= device.shared_bytes_per_block
            assert built.route_warps <= built.warps <= 14 and 1 <= built.ahead <= built.turns


def test_what_the_published_model_gets() -> None:
    """An H200 takes the published model's 1440 tiles in one round, eleven a multiprocessor; in 4 bits all turns of a
    warp are loaded at once."""
    for bits, ahead in ((16, 5), (4, 6)):
        built = row_constants(weight(bits, 5760, 8, 2304), 8, 2, H200)
        assert (built.route_warps, built.warps, built.ahead) == (9, 11, ahead)
        assert -(-1440 // built.warps) <= H200.num_sms
    assert built.ahead == built.turns == 6
    assert built.shared_bytes == 11 * 18 * 1056 + 2304 * 2 + 4 * 9 * 9


@pytest.mark.parametrize("top", [1, 2, 3, 8])
@pytest.mark.parametrize("bits", [16, 4])
def test_what_is_fetched_ahead_lies_within_an_expert(bits: int, top: int) -> None:
    """The bytes fetched ahead are a multiple of 16 and lie within one expert: of each of the published model's two
    experts 7 MiB of 26.5 MB in 16 bits, and all in 4 bits."""
    for hidden, inner in ((2304, 5760), (64, 128), (256, 16384)):
        down = stand_in(bits, 8 * hidden, inner)
        expert_bytes, ahead = bytes_ahead(down, 8, top)
        assert expert_bytes * 8 == (8 * hidden * inner * 2 if bits == 16 else down.layout.num_bytes)
        assert 0 < ahead <= expert_bytes and ahead % 16 == expert_bytes % 16 == 0 and ahead * top <= 14 << 20
    expert_bytes, ahead = bytes_ahead(stand_in(bits, 8 * 2304, 5760), 8, 2)
    assert ahead == (7 << 20 if bits == 16 else expert_bytes)
