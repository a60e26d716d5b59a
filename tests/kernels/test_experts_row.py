"""experts_row.cu, the routing and all products of one row: the bits that the row has among others, launch after
launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expert_cases import DTYPES, SCALE, Case, OnDevice, Shape, no_routing
from linear_cases import H200, ORIN, RTX_4090, older
from reference.operands import EPS
from slow_writer import SlowWriter

from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.expert_plan import experts_row_constants
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
    "many columns": Shape(128, 4160, 3, 1),
    "4 bits": Shape(256, 384, 8, 2, 128),
    "4 bits, groups of 32, zero points": Shape(384, 640, 6, 2, 32, True),
    "4 bits, zero points": Shape(512, 128, 4, 3, 128, True),
    "4 bits, long rows": Shape(4224, 256, 3, 2, 128),
    "4 bits, many columns": Shape(128, 9088, 3, 1, 128),
    "8x2B in 16 bits": Shape(2304, 5760, 4, 2),
    "8x2B in 4 bits": Shape(2304, 5760, 4, 2, 128),
}
ROWS = 12
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
gpu = pytest.mark.gpu


@gpu
@BY_DTYPE
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_alone_is_the_row_in_company(cuda: Any, name: str, dtype: DType) -> None:
    """A row alone has the bits that it has among others. All launches use the same words in memory: words left by an
    earlier launch would be another row's."""
    case = Case(SHAPES[name], dtype, ROWS)
    device = OnDevice(cuda, case)
    assert device.row_constants is not None
    routing, _, out = device.layer(np.arange(ROWS))
    for pdl in (False, True, True):
        for row in range(ROWS):
            alone, own, stream = device.layer([row], pdl=pdl, in_one=True)
            np.testing.assert_array_equal(alone.experts[0], routing.experts[row])
            np.testing.assert_array_equal(alone.shares[0], routing.shares[row])
            assert np.isnan(own).all(), "two launches"
            np.testing.assert_array_equal(stream[0], out[row])
    assert cuda.numpy(device.arrays["expert_words"])[0] == 3 * ROWS


@gpu
@pytest.mark.parametrize("name", ["4 bits", "4 bits, many columns", "8x2B in 4 bits"])
def test_the_portable_path_has_the_same_bits(cuda: Any, name: str) -> None:
    case = Case(SHAPES[name], DType.BFLOAT16, 2)
    device, portable = OnDevice(cuda, case), OnDevice(cuda, case, older(cuda.device))
    assert portable.row_constants is not None and portable.row_constants.portable
    for row in range(2):
        expected, found = (each.layer([row], in_one=True) for each in (device, portable))
        np.testing.assert_array_equal(found[2], expected[2])


@gpu
@BY_DTYPE
@pytest.mark.parametrize("name", ["16 bits", "4 bits", "8x2B in 4 bits"])
def test_one_row_is_the_oracles(cuda: Any, name: str, dtype: DType) -> None:
    """One row matches the NumPy ops that are given the device's routing."""
    case = Case(SHAPES[name], dtype, 1)
    routing, _, out = OnDevice(cuda, case).layer([0], in_one=True)
    wanted = case.x.copy()
    case.ops.experts_down(wanted, case.inner(routing, is_prefill=False), case.down, SCALE, routing, is_prefill=False)
    error = np.linalg.norm((out - wanted).astype(np.float64)) / np.linalg.norm(wanted - case.x)
    assert error <= OPS["experts_down"].tolerance[dtype]


@gpu
@pytest.mark.parametrize("name", ["odd sizes", "8x2B in 4 bits"])
def test_the_number_of_launches_may_overflow(cuda: Any, name: str) -> None:
    case = Case(SHAPES[name], DType.BFLOAT16, 6)
    device = OnDevice(cuda, case)
    expected = [device.layer([row], in_one=True)[2] for row in range(6)]
    device.arrays["expert_words"][0] = 2**32 - 3
    for row in range(6):
        np.testing.assert_array_equal(device.layer([row], in_one=True)[2], expected[row])
    assert cuda.numpy(device.arrays["expert_words"])[0] == 3


@gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_row_of_padding_has_no_experts_and_stays(cuda: Any, pdl: bool) -> None:
    case = Case(SHAPES["16 bits"], DType.BFLOAT16, 1)
    device = OnDevice(cuda, case)
    routing, _, out = device.layer([0], np.array([-1], np.int32), pdl=pdl, in_one=True)
    assert (routing.experts == -1).all() and not cuda.numpy(device.arrays["expert_words"]).any()
    np.testing.assert_array_equal(out, case.x)


@gpu
@pytest.mark.parametrize("name", ["8x2B in 16 bits", "8x2B in 4 bits"])
def test_the_row_is_read_when_the_kernel_before_has_written_it(cuda: Any, name: str) -> None:
    """The row and its slot, which an earlier kernel writes, are read after the wait; norm and router are loaded before
    it."""
    case = Case(SHAPES[name], DType.BFLOAT16, 1)
    device = OnDevice(cuda, case)
    routing, _, expected = device.layer([0], in_one=True)
    stale = [cuda.array(np.full_like(case.x, np.nan), case.dtype), cuda.array(np.full(1, -1, np.int32))]
    x, slots = (array.copy() for array in stale)
    writer = SlowWriter(cuda, [x, slots], stale, [cuda.array(case.x, case.dtype), cuda.array(np.zeros(1, np.int32))])
    ops, step = device.ops(pdl=True, in_one=True), Rows(None, None, slots, None, is_prefill=False)
    for _ in range(3):
        empty = no_routing(1, case.shape.top)
        found = Routing(cuda.array(empty.experts), cuda.array(empty.shares))
        inner = cuda.array(np.zeros((1, case.shape.top * case.shape.inner), np.float32), case.dtype)
        writer.launch()
        after = ops.route(found, x, device.norm, device.router, EPS, step)
        after = ops.experts_gate_up(inner, x, device.norm, device.gate_up, EPS, found, after, down=device.down)
        ops.experts_down(x, inner, device.down, SCALE, found, after)
        assert np.array_equal(cuda.numpy(found.experts), routing.experts)
        assert np.array_equal(cuda.numpy(x, case.dtype), expected)


def weights(bits: int, hidden: int, inner: int, experts: int, groups: tuple[int, int] = (128, 128)) -> tuple[Any, Any]:
    """Return stand-ins for an expert layer's two weights, with only shapes and layouts; `groups` are the columns of
    their scale groups."""
    shapes = (2 * experts * inner, hidden), (experts * hidden, inner)
    if bits == 16:
        first, last = (np.broadcast_to(np.zeros((), np.float16), shape) for shape in shapes)
        return first, last
    first, last = (
        PackedWeight(None, None, PackedLayout("gate_up", *shape, 8, group, False))  # type: ignore[arg-type]
        for shape, group in zip(shapes, groups, strict=True)
    )
    return first, last


@pytest.mark.parametrize("device", [H200, ORIN, RTX_4090], ids=["H200", "Orin", "4090"])
@pytest.mark.parametrize("bits", [16, 4])
def test_every_build_finds_room_at_once(device: Device, bits: int) -> None:
    for hidden in (128, 2304, 4096, 16384):
        for experts, top, inner in ((8, 2, 5760), (32, 8, 128), (1, 1, 128), (8, 2, 16384)):
            built = experts_row_constants(*weights(bits, hidden, inner, experts), experts, top, device)
            if built is not None:
                assert built.shared_bytes <= device.shared_bytes_per_block and built.grid <= device.num_sms
                assert built.route_warps <= built.warps <= 14
                assert built.grid * built.warps >= top * inner // 8 > (built.grid - 1) * built.warps


def test_what_the_published_model_gets() -> None:
    """The published model's row takes one launch on an H200, with a warp for each of 1440 tiles; a smaller GPU takes
    two launches."""
    for bits in (16, 4):
        built = experts_row_constants(*weights(bits, 2304, 5760, 8), 8, 2, H200)
        assert built is not None and (built.warps, built.grid) == (11, 131)
        assert experts_row_constants(*weights(bits, 2304, 5760, 8), 8, 2, ORIN) is None


def test_weights_of_two_kinds_take_two_launches() -> None:
    assert experts_row_constants(*weights(4, 2304, 5760, 8, (128, 64)), 8, 2, H200) is None
    mixed = weights(4, 2304, 5760, 8)[0], weights(16, 2304, 5760, 8)[1]
    assert experts_row_constants(*mixed, 8, 2, H200) is None
