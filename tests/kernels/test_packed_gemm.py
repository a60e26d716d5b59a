"""packed_gemm*.cu against NumPy, and bit for bit against products with the unpacked weight. Also their plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from linear_cases import H200, ORIN, RTX_4090, bits, layout_of
from packed_oracle import pack

from cpmrt.cuda.build.spec import macros_of
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.linear import float_bits
from cpmrt.cuda.ops.linear_packed.layout import MINIMUMS, PackedLayout
from cpmrt.cuda.ops.linear_packed.long_chunk import plan_long_chunk, takes_long_chunk
from cpmrt.cuda.ops.linear_packed.short_chunk import MOST_ROWS, ChunkPlan, plan_short_chunk
from cpmrt.dtypes import DType, from_float32, round_to
from cpmrt.ops import OPS

DTYPES = [DType.BFLOAT16, DType.FLOAT16]

# Product, rows, columns, head size, group size, zero points.
CASES = {
    "demo qkv": ("qkv", 768, 256, 64, 128, False),
    "qkv with heads of 96": ("qkv", 2688, 256, 96, 32, True),
    "0.5B down": ("residual", 1024, 4096, 0, 128, False),
    "one slice": ("residual", 16, 128, 0, 128, False),
    "uneven o": ("residual", 2640, 1152, 0, 64, True),
    "groups of 32": ("residual", 80, 640, 0, 32, False),
    "gate_up": ("gate_up", 1280, 256, 0, 64, False),
    "wide gate_up": ("gate_up", 34816, 256, 0, 128, True),
    "8B down": ("residual", 4096, 16384, 0, 128, False),
}


@dataclass
class Case:
    """A weight packed on the host, its layout, and the same weight in 16 bits."""

    layout: PackedLayout
    packed: Any
    weight: Any


def make_case(name: str, dtype: DType, device: Device) -> Case:
    product, rows, columns, head_dim, group_size, has_zeros = CASES[name]
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    groups = (rows, columns // group_size)
    scales = round_to((0.5 + rng.random(groups, np.float32)) * np.float32(0.2 * columns**-0.5), dtype)
    zeros = rng.integers(0, 17, groups).astype(np.float32) if has_zeros else None
    centre = np.float32(8) if zeros is None else np.repeat(zeros, group_size, axis=1)
    weight = round_to((codes - centre) * np.repeat(scales, group_size, axis=1), dtype)
    layout = layout_of(product, (rows, columns), group_size, device, zeros=has_zeros, head_dim=head_dim)
    words = [None if values is None else from_float32(values, dtype) for values in (scales, zeros)]
    return Case(layout, pack(layout, codes, *words), weight)


def run(cuda: Any, dtype: DType, case: Case, x: Any, y: Any | None, alpha: float, plan: ChunkPlan) -> Any:
    """Return the kernel's alpha x w^T, plus y if it is given; without y the output holds poison before. The 16 elements
    between output rows and the rows around them must stay poison."""
    count, columns = len(x), case.layout.out_features
    buffer = np.full((count + 2, columns + 16), np.nan, np.float32)
    if y is not None:
        buffer[1:-1, :columns] = y
    out = cuda.array(buffer, dtype)
    kernel = cuda.kernel(plan.kernel.name, dtype, **macros_of(plan.constants))
    sizes = *map(np.int32, (count, columns, columns + 16)), np.float32(alpha), np.float32(y is not None)
    rows = cuda.array(x, dtype)
    operands = out[1:], plan.rows(rows), cuda.array(case.packed)
    kernel(plan.grid, plan.block, *operands, *sizes, smem=plan.shared_bytes)
    result = cuda.numpy(out, dtype)
    found = result[1:-1, :columns].copy()
    result[1:-1, :columns] = np.nan
    assert np.isnan(result).all(), "stored outside y"
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", CASES)
def test_it_has_the_bits_of_the_dense_product(cuda: Any, name: str, dtype: DType) -> None:
    case, rng = make_case(name, dtype, cuda.device), np.random.default_rng(5)
    x = round_to(rng.standard_normal((MOST_ROWS, case.layout.in_features), np.float32), dtype)
    y = round_to(rng.standard_normal((MOST_ROWS, case.layout.out_features), np.float32), dtype)
    dense = Gemm(cuda.device, cuda.launcher(dtype), cuda.cupy.empty(32 << 20, np.uint8), use_library=False)
    for alpha, added in ((1.0, None), (0.22, y)):
        expected = cuda.array(y, dtype)
        held = cuda.array(x, dtype), cuda.array(case.weight, dtype)
        dense(expected, *held, alpha=alpha, beta=float(added is not None))
        words = cuda.numpy(expected, dtype)
        exact = alpha * (x.astype(np.float64) @ case.weight.T.astype(np.float64)) + (0 if added is None else added)
        assert np.linalg.norm(words - exact) <= OPS["project_residual"].tolerance[dtype] * np.linalg.norm(exact)
        for count in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, MOST_ROWS):
            plan = plan_short_chunk(case.layout, count, cuda.device)
            part = None if added is None else added[:count]
            found = run(cuda, dtype, case, x[:count], part, alpha, plan)
            assert np.array_equal(bits(found), bits(words[:count])), (count, alpha)
    dense.close()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", CASES)
def test_a_long_chunk_has_the_bits_of_the_dense_product(cuda: Any, name: str, dtype: DType) -> None:
    """A long chunk has the bits of the dense product, also with rows that fill no tile and with blocks of every
    width."""
    case, rng = make_case(name, dtype, cuda.device), np.random.default_rng(7)
    most = 300
    x = round_to(rng.standard_normal((most, case.layout.in_features), np.float32), dtype)
    y = round_to(rng.standard_normal((most, case.layout.out_features), np.float32), dtype)
    dense = Gemm(cuda.device, cuda.launcher(dtype), cuda.cupy.empty(32 << 20, np.uint8), use_library=False)
    older = replace(RTX_4090, num_sms=cuda.device.num_sms)
    for alpha, added in ((1.0, None), (0.22, y)):
        expected = cuda.array(y, dtype)
        held = cuda.array(x, dtype), cuda.array(case.weight, dtype)
        dense(expected, *held, alpha=alpha, beta=float(added is not None))
        words = cuda.numpy(expected, dtype)
        for count, sms in ((most, 132), (most, 16), (most, 4), (1, 132), (127, 132), (129, 1), (256, 64)):
            plan = plan_long_chunk(case.layout, count, replace(older, num_sms=sms))
            found = run(cuda, dtype, case, x[:count], None if added is None else added[:count], alpha, plan)
            assert np.array_equal(bits(found), bits(words[:count])), (count, sms, alpha)
    dense.close()


@pytest.mark.gpu
@pytest.mark.parametrize("threshold", [None, 0.01])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
def test_a_long_chunk_is_activated_as_by_a_kernel_behind_it(
    cuda: Any, dtype: DType, threshold: float | None
) -> None:
    device = replace(RTX_4090, num_sms=cuda.device.num_sms)
    bound = {} if threshold is None else {"FATRELU": float_bits(threshold)}
    for name in ("gate_up", "wide gate_up"):
        case, rng = make_case(name, dtype, device), np.random.default_rng(8)
        inner = case.layout.out_features // 2
        for count, sms in ((1, 132), (129, 16), (300, 1)):
            x = round_to(rng.standard_normal((count, case.layout.in_features), np.float32), dtype)
            plan = plan_long_chunk(case.layout, count, replace(device, num_sms=sms))
            both = run(cuda, dtype, case, x, None, 1.0, plan)
            behind = cuda.array(np.zeros((count, inner), np.float32), dtype)
            activate = cuda.kernel("silu_mul", dtype, INTERMEDIATE=inner, **bound)
            activate(-(-count * inner // 2048), 256, behind, cuda.array(both, dtype), np.int32(count))
            out = cuda.array(np.full((count + 2, inner), np.nan, np.float32), dtype)
            kernel = cuda.kernel(plan.kernel.name, dtype, **macros_of(plan.constants), GATED=1, **bound)
            sizes = *map(np.int32, (count, 2 * inner, inner)), np.float32(1), np.float32(0)
            operands = out[1:], cuda.array(x, dtype), cuda.array(case.packed)
            kernel(plan.grid, plan.block, *operands, *sizes, smem=plan.shared_bytes)
            words = cuda.numpy(out)
            assert np.array_equal(words[1:-1], cuda.numpy(behind)), (name, count)
            assert np.isnan(cuda.numpy(out, dtype)[[0, -1]]).all(), "stored outside y"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("other", [RTX_4090, ORIN], ids=["RTX 4090", "Orin"])
def test_the_plans_of_other_devices_give_the_same_bits(cuda: Any, other: Device, tokens: int) -> None:
    dtype, rng = DType.BFLOAT16, np.random.default_rng(6)
    case = make_case("uneven o", dtype, cuda.device)
    x = round_to(rng.standard_normal((tokens, case.layout.in_features), np.float32), dtype)
    plans = (plan_short_chunk(case.layout, tokens, device) for device in (cuda.device, other))
    found = [run(cuda, dtype, case, x, None, 1.0, plan) for plan in plans]
    assert np.array_equal(bits(found[0]), bits(found[1]))


@pytest.mark.parametrize("device", [H200, RTX_4090, ORIN], ids=["H200", "RTX 4090", "Orin"])
@pytest.mark.parametrize("group_size", [32, 128])
def test_a_plan_fits_the_device_and_covers_the_product(device: Device, group_size: int) -> None:
    for product, rows, columns in (("gate_up", 32768, 4096), ("residual", 4096, 16384), ("residual", 16, 128)):
        layout = layout_of(product, (rows, columns), group_size, device, zeros=group_size == 32)
        for count in (1, 16, 17, 32, 33, 64, 65, MOST_ROWS):
            plan = plan_short_chunk(layout, count, device)
            own = plan.constants
            assert plan.shared_bytes <= device.shared_bytes_per_block
            assert plan.kernel.name == ("packed_gemm_wgmma" if device.capability == 90 else "packed_gemm")
            assert plan.block <= 1024
            assert own.stages >= 3
            assert (plan.grid[0] - 1) * own.tiles < layout.num_tiles <= plan.grid[0] * own.tiles
            assert (plan.grid[1] - 1) * own.tokens < count <= plan.grid[1] * own.tokens


@pytest.mark.parametrize("device", [RTX_4090, ORIN], ids=["RTX 4090", "Orin"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_plan_of_a_long_chunk_fits_the_device_and_covers_the_product(device: Device, group_size: int) -> None:
    for product, rows, columns in (("gate_up", 32768, 4096), ("residual", 4096, 16384), ("residual", 16, 128)):
        layout = layout_of(product, (rows, columns), group_size, device, zeros=group_size == 32)
        for count in (129, 256, 2048, 8192):
            plan = plan_long_chunk(layout, count, device)
            own = plan.constants
            assert plan.kernel.name == "packed_gemm_wide"
            assert plan.shared_bytes <= device.shared_bytes_per_block
            assert own.stages >= 3
            assert plan.block == 16 * own.tiles
            assert plan.grid == -(-count // 128) * -(-layout.num_tiles // own.tiles)


def test_long_chunks_are_unpacked_in_memory_where_a_library_is_faster_and_for_other_codes() -> None:
    symmetric = layout_of("gate_up", (32768, 4096), 128, RTX_4090)
    assert takes_long_chunk(symmetric, RTX_4090)
    assert not takes_long_chunk(symmetric, H200)
    for other in ({"bits": 2}, {"bits": 8}, {"zeros": MINIMUMS}, {"scale_group": 16}):
        assert not takes_long_chunk(replace(symmetric, **other), RTX_4090)
