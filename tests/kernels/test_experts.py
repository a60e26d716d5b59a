"""experts.cu and experts_down.cu against the NumPy ops, and a row's bits, which must not depend on the other rows. Also
their plans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from expert_cases import DTYPES, SCALE, Case, OnDevice, Shape
from linear_cases import H200, ORIN, RTX_4090

from cpmrt.bench.shapes import gptq_config, shape_config
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.config.layers import ExpertsMlp
from cpmrt.config.quantization import read_quantization
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.expert_plan import down_constants, most_tiles, product_constants
from cpmrt.cuda.ops.experts import expert_workspace
from cpmrt.cuda.ops.linear_packed.layout import PackedLayout, PackedWeight
from cpmrt.dtypes import DType
from cpmrt.errors import UnsupportedModelError
from cpmrt.models.planning import weight_specs
from cpmrt.ops import OPS

SMALL = {
    "16 bits": Shape(128, 192, 8, 2),
    "odd sizes": Shape(192, 64, 5, 3),
    "one column of slices": Shape(64, 64, 3, 1),
    "every expert": Shape(128, 128, 4, 4),
    "as many as there may be": Shape(128, 64, 32, 8),
    "long rows": Shape(4160, 192, 3, 2),
    "4 bits": Shape(256, 384, 8, 2, 128),
    "4 bits, groups of 64": Shape(128, 256, 5, 2, 64),
    "4 bits, groups of 32, zero points": Shape(384, 640, 6, 2, 32, True),
    "4 bits, zero points": Shape(256, 128, 4, 3, 128, True),
    "4 bits, one group a row": Shape(256, 256, 4, 2, 256),
    "4 bits, long rows": Shape(4224, 256, 3, 2, 128),
}
LARGE = {"8x2B in 16 bits": Shape(2304, 5760, 3, 2), "8x2B in 4 bits": Shape(2304, 5760, 3, 2, 128)}
STEPS = (1, 2, 5, 8, 9, 16, 17, 33, 64)
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
gpu = pytest.mark.gpu


def check(name: str, dtype: DType, found: Any, expected: Any) -> None:
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= OPS[name].tolerance[dtype], (name, error)


def check_rows(case: Case, device: OnDevice, kind: str, is_prefill: bool) -> tuple[Any, Any, Any]:
    """Check both products of all rows against the oracle, whose second product gets the device's rows, not its own."""
    routing = case.routing(kind)
    kept = routing.experts[:, 0] >= 0
    inner, out = device.run(routing, is_prefill=is_prefill)
    expected = case.inner(routing, is_prefill)
    check("experts_gate_up", case.dtype, inner[kept], expected[kept])
    wanted = case.x.copy()
    case.ops.experts_down(wanted, np.where(kept[:, None], inner, 0), case.down, SCALE, routing, is_prefill=is_prefill)
    check("experts_down", case.dtype, out[kept] - case.x[kept], (wanted - case.x)[kept])
    np.testing.assert_array_equal(out[~kept], case.x[~kept])
    return routing, inner, out


def check_company(case: Case, device: OnDevice, kind: str, orders: Iterable[Any], *, is_prefill: bool) -> None:
    """Check all rows against the oracle, then that the rows of each of `orders` alone have the same bits."""
    routing, inner, out = check_rows(case, device, kind, is_prefill)
    kept = routing.experts[:, 0] >= 0
    for rows in orders:
        for pdl, together in ((False, True), (True, True), (True, False)):
            some, stream = device.run(routing, rows, is_prefill=is_prefill, pdl=pdl, together=together)
            np.testing.assert_array_equal(some[kept[rows]], inner[rows][kept[rows]], str(rows))
            np.testing.assert_array_equal(stream, out[rows], str(rows))


@gpu
@BY_DTYPE
@pytest.mark.parametrize("kind", ["router", "one", "padded"])
@pytest.mark.parametrize("name", SMALL)
def test_steps(cuda: Any, name: str, dtype: DType, kind: str) -> None:
    """64 rows match the oracle; fewer rows, in another order and with other neighbours, have the same bits."""
    case = Case(SMALL[name], dtype, 64)
    orders = [np.arange(count) for count in STEPS] + [case.random.permutation(64)[:count] for count in STEPS]
    orders += [np.array([row]) for row in (1, 2, 63)]  # in "padded" row 0 has no experts
    check_company(case, OnDevice(cuda, case), kind, orders, is_prefill=False)


@gpu
@BY_DTYPE
@pytest.mark.parametrize("kind", ["router", "one", "padded"])
@pytest.mark.parametrize("name", SMALL)
def test_chunks(cuda: Any, name: str, dtype: DType, kind: str) -> None:
    """300 rows match the oracle; a row's bits do not depend on the chunk around it."""
    case = Case(SMALL[name], dtype, 300)
    orders = (np.arange(1), np.arange(64), np.arange(65), np.arange(30, 290), case.random.permutation(300))
    check_company(case, OnDevice(cuda, case), kind, orders, is_prefill=True)


@gpu
@BY_DTYPE
@pytest.mark.parametrize("name", LARGE)
def test_sizes_of_the_published_model(cuda: Any, name: str, dtype: DType) -> None:
    for num_rows, is_prefill in ((64, False), (150, True)):
        case = Case(LARGE[name], dtype, num_rows)
        device = OnDevice(cuda, case)
        routing, inner, out = check_rows(case, device, "router", is_prefill)
        for rows in (np.arange(1), np.arange(7), np.arange(20, 40)):
            some, stream = device.run(routing, rows, is_prefill=is_prefill, pdl=True)
            np.testing.assert_array_equal(some, inner[rows])
            np.testing.assert_array_equal(stream, out[rows])


@gpu
def test_another_expert_is_noticed(cuda: Any) -> None:
    """The comparison can fail: with the experts' numbers shifted by one the results are far outside the tolerance."""
    case = Case(SMALL["16 bits"], DType.FLOAT16, 8)
    routing, device = case.routing("router"), OnDevice(cuda, case)
    inner, _ = device.run(routing)
    routing.experts[:] = (routing.experts + 1) % 8
    expected = case.inner(routing, is_prefill=False)
    with pytest.raises(AssertionError):
        check("experts_gate_up", case.dtype, inner, expected)


@pytest.mark.parametrize("tokens", [8, 16, 32, 64])
@pytest.mark.parametrize(("experts", "top"), [(1, 1), (3, 2), (8, 2), (32, 8)])
def test_there_are_blocks_for_every_choice(tokens: int, experts: int, top: int) -> None:
    """The grid, which is fixed before experts are chosen, has a block for every tile of any choice, and at most one for
    each pair of row and expert."""
    random = np.random.default_rng(tokens)
    for num_rows in (1, 2, 7, 8, 9, 31, 64, 65, 300):
        room = most_tiles(num_rows, top, experts, tokens)
        choices = [np.stack([random.permutation(experts)[:top] for _ in range(num_rows)]) for _ in range(20)]
        choices += [np.tile(np.arange(top), (num_rows, 1))]
        needed = [sum(-(-count // tokens) for count in np.bincount(choice.ravel())) for choice in choices]
        assert max(needed) <= room <= num_rows * top


def weight(form: str, in_features: int) -> Any:
    """Return a stand-in for a weight, which has only a shape and a layout."""
    if form == "16":
        return np.empty((64, in_features), np.float16)
    group, zeros = (128, False) if form == "4" else (32, True)
    return PackedWeight(None, None, PackedLayout("gate_up", 64, in_features, 8, group, zeros))


@pytest.mark.parametrize("device", [H200, ORIN, RTX_4090], ids=["H200", "Orin", "4090"])
@pytest.mark.parametrize("form", ["16", "4", "4 in small groups"])
def test_every_build_fits_the_shared_memory(device: Device, form: str) -> None:
    room = device.shared_bytes_per_block
    for in_features in (128, 2304, 5760, 16384):
        held = weight(form, in_features)
        for num_rows in (1, 2, 8, 9, 16, 17, 64):
            assert product_constants(0, held, num_rows, is_chunk=False).shared_bytes <= room
            down = down_constants(held, num_rows, 2, device)
            assert down.shared_bytes(num_rows * 2) <= room
            # With one block a multiprocessor the blocks of the last tiles would have to wait for a second round.
            assert 2 * down.shared_bytes(num_rows * 2) <= room or device is not H200
        assert product_constants(1, held, 300, is_chunk=True).shared_bytes <= room


def test_too_many_experts_a_row_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="num_experts_per_tok is too large for this GPU"):
        down_constants(weight("16", 5760), 64, 30, RTX_4090)


def test_shared_memory_is_what_the_kernels_take() -> None:
    """The plans' shared memory is what experts_down.cu and experts.cu take.

    experts_down.cu: 8 warps, each with turns of two slices and one row or of one slice and eight rows; 4352 bytes; and
    68 bytes for each pair of row and expert. experts.cu: x, three turns of weights for each warp, and 8 bytes for each
    row.
    """
    four, sixteen = weight("4", 5760), weight("16", 5760)
    down = replace(down_constants(four, 1, 2, H200), ahead=4)
    assert down.shared_bytes(2) == 8 * 4 * (2 * 1056 + 512 + 64) + 4352 + 2 * 68
    down = replace(down_constants(sixteen, 8, 2, H200), ahead=3)
    assert down.shared_bytes(16) == 8 * 3 * (2048 + 8 * (128 + 64)) + 4352 + 16 * 68
    few = product_constants(0, weight("4", 2304), 2, is_chunk=False)
    assert few.shared_bytes == 8 * (2304 * 2 + 64) + 4 * 3 * 3 * 1056 + 64
    many = product_constants(0, weight("16", 2304), 64, is_chunk=False)
    assert many.shared_bytes == 3 * 32 * (256 + 64) + 8 * 3 * 2048 + 8 * 32


def test_four_bit_experts_in_another_order_of_columns_are_refused_with_the_way_out() -> None:
    config = ModelConfig.from_hf(shape_config("minicpm-moe-8x2b") | {"num_hidden_layers": 1})
    for act_order in (False, True):
        settings = {"quantization_config": gptq_config() | {"desc_act": act_order}}
        ordered = replace(config, quantization=read_quantization(settings, "config.json", None))
        specs = weight_specs(ordered, EngineConfig())
        assert isinstance(ordered.mlp, ExpertsMlp)
        given = (specs, ordered.mlp, ordered.hidden_size, 512)
        if not act_order:
            names = {buffer.name for buffer in expert_workspace(*given)}
            assert names == {"expert_starts", "expert_order", "expert_outputs"}
            continue
        with pytest.raises(UnsupportedModelError, match="experts_gate_up: .*act-order; use a checkpoint with desc_act"):
            list(expert_workspace(*given))
