"""packed_gemm*.cu against NumPy, and bit for bit against products with the unpacked weight. Also their plans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from kernel_compiles import Compiles
from linear_cases import H200, ORIN, RTX_4090, bits, layout_of, older
from packed_oracle import pack

from cpmrt.bench.shapes import gptq_config, shape_config
from cpmrt.config import EngineConfig, ModelConfig
from cpmrt.cuda.build.spec import macros_of
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.gemm import Gemm
from cpmrt.cuda.ops.linear import float_bits
from cpmrt.cuda.ops.linear_packed.chunk import (
    BLOCKS,
    Block,
    ChunkPlan,
    GatedConstants,
    blocks_for,
    most_chunk_rows,
    plan_block,
    plan_chunk,
)  # fmt: skip
from cpmrt.cuda.ops.linear_packed.layout import MINIMUMS, ZERO_POINTS, PackedLayout, packed_layout
from cpmrt.cuda.ops.linear_packed.products import packed_workspace
from cpmrt.cuda.precompile import known_device
from cpmrt.dtypes import DType, from_float32, round_to
from cpmrt.models.planning import weight_specs
from cpmrt.ops import OPS

DTYPES = [DType.BFLOAT16, DType.FLOAT16]

# Product, rows, columns, head size, group size, kind of zeros, bits.
CASES = {
    "demo qkv": ("qkv", 768, 256, 64, 128, 0, 4),
    "qkv with heads of 96": ("qkv", 2688, 256, 96, 32, ZERO_POINTS, 4),
    "0.5B down": ("residual", 1024, 4096, 0, 128, 0, 4),
    "one slice": ("residual", 16, 128, 0, 128, 0, 4),
    "uneven o": ("residual", 2640, 1152, 0, 64, ZERO_POINTS, 4),
    "groups of 32": ("residual", 80, 640, 0, 32, 0, 4),
    "square": ("residual", 512, 512, 0, 128, 0, 4),
    "gate_up": ("gate_up", 1280, 256, 0, 64, 0, 4),
    "wide gate_up": ("gate_up", 34816, 256, 0, 128, ZERO_POINTS, 4),
    "8B down": ("residual", 4096, 16384, 0, 128, 0, 4),
    "Q4_K gate_up": ("gate_up", 1280, 512, 0, 32, MINIMUMS, 4),
    "Q4_K qkv": ("qkv", 2688, 256, 96, 32, MINIMUMS, 4),
    "ternary down": ("residual", 1040, 4096, 0, 128, 0, 2),
    "Q3_K o": ("residual", 80, 640, 0, 16, 0, 4),
    "groups of 16": ("residual", 1040, 640, 0, 16, ZERO_POINTS, 4),
    "Q5_K gate_up": ("gate_up", 1280, 256, 0, 32, MINIMUMS, 8),
    "ternary gate_up": ("gate_up", 1280, 256, 0, 64, 0, 2),
    "Q8_0 qkv": ("qkv", 768, 640, 64, 32, 0, 8),
    "Q8_0 gate_up": ("gate_up", 1280, 256, 0, 32, 0, 8),
    "Q6_K down": ("residual", 80, 1152, 0, 16, 0, 8),
    "Q5_K with a smaller group": ("residual", 1040, 640, 0, 16, MINIMUMS, 8),
}


@dataclass
class Case:
    """A weight packed on the host, its layout, and the same weight in 16 bits."""

    layout: PackedLayout
    packed: Any
    weight: Any


def make_case(name: str, dtype: DType, device: Device) -> Case:
    product, rows, columns, head_dim, group_size, kind, bits = CASES[name]
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 2**bits, (rows, columns)).astype(np.uint8)
    groups = (rows, columns // group_size)
    unit = np.float32(0.2 * columns**-0.5)
    scales = round_to((0.5 + rng.random(groups, np.float32)) * unit * 2.0 ** (4 - bits), dtype)
    layout = layout_of(product, (rows, columns), group_size, device, zeros=kind, head_dim=head_dim, bits=bits)
    assert (layout.zeros, layout.scale_group) == (kind, group_size)
    beside, each = None, partial(np.repeat, repeats=group_size, axis=1)
    if kind == MINIMUMS:  # multiples of a unit, so that float32 holds every weight before it is rounded
        beside = round_to(rng.integers(1, 64, groups).astype(np.float32) * 2.0 ** np.floor(np.log2(unit)) / 4, dtype)
        weight = codes * each(scales) - each(beside)
    else:
        beside = rng.integers(0, 17, groups).astype(np.float32) if kind else None
        weight = (codes - (np.float32(2 ** (bits - 1)) if beside is None else each(beside))) * each(scales)
    words = [None if values is None else from_float32(values, dtype) for values in (scales, beside)]
    return Case(layout, pack(layout, codes, *words), round_to(weight, dtype))


def run(
    cuda: Any, dtype: DType, case: Case, x: Any, y: Any | None, alpha: float, plan: ChunkPlan, chunk: Any = None
) -> Any:
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
    operands = out[1:], plan.rows(rows), cuda.array(case.packed), chunk
    kernel(plan.grid, plan.block, *operands, *sizes, smem=plan.shared_bytes)
    result = cuda.numpy(out, dtype)
    found = result[1:-1, :columns].copy()
    result[1:-1, :columns] = np.nan
    assert np.isnan(result).all(), "stored outside y"
    return found


def blocks_of(case: Case, device: Device) -> list[Block]:
    """Return the blocks of every kernel that takes the weight and runs on the device, those for older ones too."""
    own = blocks_for(case.layout, device) if device.capability == 90 else ()
    return [*blocks_for(case.layout, older(device)), *own]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", CASES)
def test_every_block_has_the_bits_of_the_dense_product(cuda: Any, name: str, dtype: DType) -> None:
    """Blocks of every kind have the bits of the dense product, also with rows that fill no block."""
    case, rng = make_case(name, dtype, cuda.device), np.random.default_rng(5)
    most = 300
    x = round_to(rng.standard_normal((most, case.layout.in_features), np.float32), dtype)
    y = round_to(rng.standard_normal((most, case.layout.out_features), np.float32), dtype)
    dense = Gemm(cuda.device, cuda.launcher(dtype), cuda.cupy.empty(32 << 20, np.uint8), use_library=False)
    for alpha, added in ((1.0, None), (0.22, y)):
        expected = cuda.array(y, dtype)
        held = cuda.array(x, dtype), cuda.array(case.weight, dtype)
        dense(expected, *held, alpha=alpha, beta=float(added is not None))
        words = cuda.numpy(expected, dtype)
        exact = alpha * (x.astype(np.float64) @ case.weight.T.astype(np.float64)) + (0 if added is None else added)
        assert np.linalg.norm(words - exact) <= OPS["project_residual"].tolerance[dtype] * np.linalg.norm(exact)
        for block in blocks_of(case, cuda.device):
            for count in (1, 15, block.rows - 1, block.rows, block.rows + 1, most):
                plan = plan_block(block, case.layout, count, cuda.device)
                found = run(cuda, dtype, case, x[:count], None if added is None else added[:count], alpha, plan)
                assert np.array_equal(bits(found), bits(words[:count])), (block, count, alpha)
    dense.close()


@pytest.mark.gpu
def test_dependent_launches_keep_the_order(cuda: Any) -> None:
    """Each launch reads the rows that the one before has written, with and without a dependent-launch edge."""
    dtype, rng, rows = DType.BFLOAT16, np.random.default_rng(4), 256
    case = make_case("square", dtype, cuda.device)
    x, packed = rng.standard_normal((rows, case.layout.in_features), np.float32), cuda.array(case.packed)
    sizes = *map(np.int32, (rows, x.shape[1], x.shape[1])), np.float32(1), np.float32(0)
    chunk = cuda.array(np.array([0, 0, rows, 0], np.int32))
    for block in blocks_of(case, cuda.device):
        plan, results = plan_block(block, case.layout, rows, cuda.device), []
        kernel = cuda.kernel(plan.kernel.name, dtype, **macros_of(plan.constants))
        for pdl in (False, True):
            buffers = [cuda.array(x, dtype) for _ in range(2)]
            maps = [plan.rows(buffer) for buffer in buffers]
            for step in range(12):
                operands = buffers[1 - step % 2], maps[step % 2], packed, chunk
                kernel(plan.grid, plan.block, *operands, *sizes, smem=plan.shared_bytes, pdl=pdl)
            results.append(cuda.numpy(buffers[0]))
        assert np.array_equal(*results), block


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 64, 65, 128, 129, 300])
def test_groups_of_rows_behind_a_chunk_stay_as_they_are(cuda: Any, count: int) -> None:
    dtype, rng, rows = DType.BFLOAT16, np.random.default_rng(9), 384
    case, last = make_case("uneven o", dtype, cuda.device), -(-count // 128) * 128
    x, chunk = rng.standard_normal((rows, case.layout.in_features), np.float32), np.array([0, 7, count, 1], np.int32)
    for block in blocks_of(case, cuda.device):
        plan = plan_block(block, case.layout, rows, cuda.device)
        whole = run(cuda, dtype, case, x, None, 1.0, plan)
        found = run(cuda, dtype, case, x, None, 1.0, plan, cuda.array(chunk))
        assert np.array_equal(bits(found[:last]), bits(whole[:last])), block
        assert np.isnan(found[last:]).all(), (block, "rows behind the chunk were written")


@pytest.mark.gpu
@pytest.mark.parametrize("threshold", [None, 0.01])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
def test_a_chunk_is_activated_as_by_a_kernel_behind_it(cuda: Any, dtype: DType, threshold: float | None) -> None:
    bound = {} if threshold is None else {"FATRELU": float_bits(threshold)}
    for name in ("gate_up", "wide gate_up", "Q4_K gate_up", "ternary gate_up", "Q8_0 gate_up"):
        case, rng = make_case(name, dtype, cuda.device), np.random.default_rng(8)
        inner = case.layout.out_features // 2
        for count, last in ((1, 1), (129, 129), (300, 100)):
            x = round_to(rng.standard_normal((count, case.layout.in_features), np.float32), dtype)
            both = run(cuda, dtype, case, x, None, 1.0, plan_block(BLOCKS[0], case.layout, count, cuda.device))
            behind = cuda.array(np.zeros((count, inner), np.float32), dtype)
            activate = cuda.kernel("silu_mul", dtype, INTERMEDIATE=inner, **bound)
            activate(-(-count * inner // 2048), 256, behind, cuda.array(both, dtype), np.int32(count))
            for block in blocks_of(case, cuda.device):
                if block.kernel.name not in ("packed_gemm_wgmma", "packed_gemm_wide"):
                    continue
                plan, rows = plan_block(block, case.layout, count, cuda.device), cuda.array(x, dtype)
                out = cuda.array(np.full((count + 2, inner), np.nan, np.float32), dtype)
                kernel = cuda.kernel(plan.kernel.name, dtype, **macros_of(plan.constants), GATED=1, **bound)
                sizes = *map(np.int32, (count, 2 * inner, inner)), np.float32(1), np.float32(0)
                chunk = cuda.array(np.array([0, 7, last, 1], np.int32))
                operands = out[1:], plan.rows(rows), cuda.array(case.packed), chunk
                kernel(plan.grid, plan.block, *operands, *sizes, smem=plan.shared_bytes)
                end = min(-(-last // 128) * 128, count)
                assert np.array_equal(cuda.numpy(out)[1 : end + 1], cuda.numpy(behind)[:end]), (name, block, count)
                assert np.isnan(cuda.numpy(out, dtype)[[0, *range(end + 1, count + 2)]]).all(), "stored outside y"


SHAPES = (("gate_up", (32768, 4096)), ("residual", (4096, 16384)), ("residual", (16, 128)), ("qkv", (4608, 4096)))
KINDS = (
    (16, ZERO_POINTS, 4), (32, ZERO_POINTS, 4), (64, 0, 4), (128, 0, 4), (32, MINIMUMS, 4), (128, 0, 2), (32, 0, 8),
    (16, 0, 8), (16, MINIMUMS, 8),
)  # fmt: skip
ARCHITECTURES = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
DEVICES = [*map(known_device, ARCHITECTURES), older(H200)]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"{device.arch}-{device.capability}")
@pytest.mark.parametrize(("group_size", "kind", "bits"), KINDS)
def test_a_plan_fits_the_device_and_covers_the_product(device: Device, group_size: int, kind: int, bits: int) -> None:
    for product, shape in SHAPES:
        layout = layout_of(product, shape, group_size, device, zeros=kind, head_dim=128, bits=bits)
        for count in (1, 63, 64, 65, 128, 129, 500, 512, 1000, 2048):
            plan = plan_chunk(layout, count, device)
            assert (plan is None) == (count > most_chunk_rows(layout, device))
            if plan is None:
                continue
            own = plan.constants
            assert (plan.kernel.name == "packed_gemm_wgmma") == (device.capability == 90)
            assert plan.shared_bytes <= device.shared_bytes_per_block
            assert own.stages >= 3
            assert plan.block <= 1024
            rows = getattr(own, "tokens", 128 if isinstance(own, GatedConstants) else 64)
            tile_blocks, row_blocks = -(-layout.num_tiles // own.tiles), -(-count // rows)
            grids = {
                "packed_gemm": (tile_blocks, row_blocks), "packed_gemm_wgmma": (row_blocks, tile_blocks),
                "packed_gemm_wide": tile_blocks * row_blocks,
            }  # fmt: skip
            assert plan.grid == grids[plan.kernel.name]


@pytest.mark.parametrize(("group_size", "kind", "bits"), KINDS)
@pytest.mark.parametrize("arch", [pytest.param("sm_90", marks=pytest.mark.all), "sm_87"])
def test_every_block_compiles_without_spills(
    compiles: Compiles, arch: str, group_size: int, kind: int, bits: int
) -> None:
    device = known_device(arch)
    layout = layout_of("gate_up", (32768, 4096), group_size, device, zeros=kind, bits=bits)
    for block in blocks_for(layout, device):
        plan = plan_block(block, layout, 64, device)
        for dtype in DTYPES if arch == "sm_90" else DTYPES[:1]:
            log = compiles.module(plan.kernel.file, arch, dtype, plan.constants).log
            assert " 0 bytes spill stores, 0 bytes spill loads" in log, (block, dtype, log)
            assert "warning" not in log and "C75" not in log, log


@pytest.mark.parametrize("device", [H200, ORIN, known_device("sm_110")], ids=["H200", "Orin", "Thor"])
@pytest.mark.parametrize("max_rows", [64, 512, 1024, 2048])
def test_there_is_memory_for_a_weight_wherever_it_is_unpacked_there(device: Device, max_rows: int) -> None:
    config = ModelConfig.from_hf(shape_config("minicpm4-8b") | {"quantization_config": gptq_config()})
    settings = EngineConfig(prefill_chunk=max_rows)
    specs = [spec for spec in weight_specs(config, settings) if spec.name.startswith("layers.0.") and spec.quant]
    names = [spec.name for spec in packed_workspace(specs, config, max_rows, device)]
    plans = [plan_chunk(packed_layout(spec, device), max_rows, device) for spec in specs]
    assert ("packed_unpacked" in names) == (None in plans)


# Product, shape, rows of a chunk; tiles and rows of the fastest block of those that were measured on an H200.
FASTEST = [
    ("gate_up", (32768, 4096), 64, 16, 64),
    ("gate_up", (32768, 4096), 128, 16, 128),
    ("gate_up", (12288, 2048), 256, 12, 128),
    ("residual", (4096, 16384), 128, 4, 64),
    ("residual", (4096, 16384), 256, 4, 128),
    ("residual", (4096, 16384), 512, 8, 128),
    ("residual", (4096, 4096), 1024, 16, 128),
    ("qkv", (4608, 4096), 128, 4, 128),
    ("qkv", (4608, 4096), 512, 12, 128),
]


@pytest.mark.parametrize(("product", "shape", "count", "tiles", "rows"), FASTEST)
def test_a_plan_takes_the_blocks_that_were_the_fastest(
    product: str, shape: tuple[int, int], count: int, tiles: int, rows: int
) -> None:
    plan = plan_chunk(layout_of(product, shape, 128, H200, head_dim=128), count, H200)
    assert plan is not None
    assert (plan.constants.tiles, plan.constants.tokens) == (tiles, rows)


def test_long_chunks_are_unpacked_in_memory_where_that_is_faster() -> None:
    gate_up, down = (layout_of(*each, 128, H200) for each in SHAPES[:2])
    thor, rtx_5090 = map(known_device, ("sm_110", "sm_120"))
    ternary = replace(gate_up, bits=2)
    for layout, device, most in (
        (down, H200, 1024), (gate_up, thor, 128), (down, thor, 128), (gate_up, H200, None), (down, RTX_4090, None),
        (down, ORIN, None), (gate_up, rtx_5090, None), (down, rtx_5090, None), (ternary, H200, None),
        (ternary, ORIN, None), (ternary, rtx_5090, None), (replace(gate_up, bits=8), H200, 512),
        (replace(gate_up, zeros=MINIMUMS), H200, 1024),
    ):  # fmt: skip
        assert plan_chunk(layout, most or 1 << 20, device) is not None, (layout, device)
        assert (plan_chunk(layout, (most or 1 << 20) + 1, device) is None) == (most is not None), (layout, device)
