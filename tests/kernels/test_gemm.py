"""gemm against NumPy: edges of tiles, both types, every tile size, alpha and beta; and the choice of a tile size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_builds import constant_sets

from cpmrt.cuda.build.spec import macros_of
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops.gemm import Gemm, GemmConstants, gemm_tile
from cpmrt.cuda.precompile import known_device
from cpmrt.cuda.step.memory import BUCKETS
from cpmrt.dtypes import DType, round_to
from cpmrt.ops import OPS

DTYPES = [DType.BFLOAT16, DType.FLOAT16]
GUARD = 256
H200, ORIN, ADA = map(known_device, ("sm_90", "sm_87", "sm_89"))


def run(
    cuda: Any,
    dtype: DType,
    tile: Mapping[str, int],
    x: np.ndarray[Any, Any],
    w: np.ndarray[Any, Any],
    y: np.ndarray[Any, Any] | None = None,
    alpha: float = 1.0,
    pdl: bool = False,
    gap: int = 0,
) -> np.ndarray[Any, Any]:
    """Return the kernel's alpha x w^T, plus y if it is given; without y the output holds poison before.

    `gap` elements lie between the output's rows; they and the guards around the output must stay poison.
    """
    (m, k), n = x.shape, w.shape[0]
    shared = (128 + tile["TILE_N"]) * tile["TILE_K"] * 2 * tile["STAGES"]
    if shared > cuda.device.shared_bytes_per_block:
        pytest.skip(f"{shared} bytes of shared memory a block are more than this device has")
    buffer = np.full(m * (n + gap) + 2 * GUARD, np.nan, np.float32)
    if y is not None:
        buffer[GUARD:-GUARD].reshape(m, n + gap)[:, :n] = y
    out = cuda.array(buffer, dtype)
    gemm = cuda.kernel("gemm", dtype, **tile)
    grid = -(-m // 128) * -(-n // tile["TILE_N"])
    sizes = (*map(np.int32, (m, n, k, n + gap)), np.float32(alpha), np.float32(y is not None))
    args = (out[GUARD:], cuda.array(x, dtype), cuda.array(w, dtype), None, *sizes)
    gemm(grid, tile["TILE_N"], *args, smem=shared, pdl=pdl)
    result: np.ndarray[Any, Any] = cuda.numpy(out, dtype)
    assert np.isnan(result[:GUARD]).all() and np.isnan(result[-GUARD:]).all(), "stored outside y"
    rows = result[GUARD:-GUARD].reshape(m, n + gap)
    assert np.isnan(rows[:, n:]).all(), "stored between the rows of y"
    return rows[:, :n]


def integers(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    """Return small random integers, whose products sum up exactly in float32, in any order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", constant_sets("linear/gemm.cu"), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 16, 32), (65, 80, 96), (128, 256, 64), (129, 272, 160), (300, 784, 1056), (2200, 64, 128)], ids=str
)
def test_every_element_is_exact(cuda: Any, tile: Mapping[str, int], dtype: DType, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, w, y = integers(1, m, k), integers(2, n, k), integers(3, m, n)
    assert np.array_equal(run(cuda, dtype, tile, x, w), round_to(x @ w.T, dtype))
    added = run(cuda, dtype, tile, x, w, y, alpha=0.375, gap=24)
    assert np.array_equal(added, round_to(round_to(np.float32(0.375) * (x @ w.T), dtype) + y, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_sum_is_within_tolerance(cuda: Any, dtype: DType) -> None:
    random = np.random.default_rng(7)
    x = round_to(random.standard_normal((200, 12288), np.float32), dtype)
    w = round_to(random.standard_normal((512, 12288), np.float32) / 110, dtype)
    y = round_to(random.standard_normal((200, 512), np.float32), dtype)
    expected = np.float32(0.3) * (x @ w.T) + y
    out = run(cuda, dtype, constant_sets("linear/gemm.cu")[0], x, w, y, alpha=0.3)
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error <= OPS["project_residual"].tolerance[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_tile_and_company(cuda: Any, dtype: DType) -> None:
    random = np.random.default_rng(9)
    x, w = random.standard_normal((330, 1056), np.float32), random.standard_normal((400, 1056), np.float32)
    whole = run(cuda, dtype, constant_sets("linear/gemm.cu")[0], x, w)
    for tile in constant_sets("linear/gemm.cu"):
        if (128 + tile["TILE_N"]) * tile["TILE_K"] * 2 * tile["STAGES"] <= cuda.device.shared_bytes_per_block:
            for begin, end in ((0, 330), (0, 1), (70, 200), (329, 330)):
                assert np.array_equal(run(cuda, dtype, tile, x[begin:end], w), whole[begin:end])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1280, 1024), (784, 1056), (4096, 16384), (640, 256)], ids=str)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (0.22, 1.0)])
def test_the_library_gives_the_bits_of_the_own_kernel_in_every_bucket(
    cuda: Any, dtype: DType, shape: tuple[int, int], alpha: float, beta: float
) -> None:
    columns, inner = shape
    random = np.random.default_rng(11)
    x, y = random.standard_normal((64, inner), np.float32), random.standard_normal((64, columns), np.float32)
    w = cuda.array(random.standard_normal((columns, inner), np.float32) / inner**0.5, dtype)
    gemms = [
        Gemm(cuda.device, cuda.launcher(dtype), cuda.cupy.empty(32 << 20, np.uint8), use_library=use_library)
        for use_library in (False, True)
    ]
    if gemms[1].reason is not None:
        pytest.skip(gemms[1].reason)
    expected = None
    for bucket in BUCKETS:
        for gemm in gemms:
            out = cuda.array(np.tile(y, (bucket // 64, 1)), dtype)
            gemm(out, cuda.array(np.tile(x, (bucket // 64, 1)), dtype), w, alpha=alpha, beta=beta)
            found = cuda.numpy(out, dtype).reshape(-1, 64, columns)
            expected = found[0] if expected is None else expected
            assert (found == expected).all(), (bucket, gemm.reason)
    assert gemms[1].reason is None, "an algorithm was found for every bucket"
    for gemm in gemms:
        gemm.close()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 128, 129, 300])
def test_groups_of_rows_behind_a_chunk_stay_as_they_are(cuda: Any, count: int) -> None:
    dtype, rng, rows, columns = DType.BFLOAT16, np.random.default_rng(9), 384, 256
    x, w = rng.standard_normal((rows, 512), np.float32), rng.standard_normal((columns, 512), np.float32)
    held = cuda.array(x, dtype), cuda.array(w, dtype)
    gemm = Gemm(cuda.device, cuda.launcher(dtype), cuda.cupy.empty(32 << 20, np.uint8), use_library=False)
    whole, part = (cuda.array(np.full((rows, columns), np.nan, np.float32), dtype) for _ in range(2))
    gemm(whole, *held)
    gemm(part, *held, chunk=cuda.array(np.array([0, 7, count, 1], np.int32)))
    found, last = cuda.numpy(part), -(-count // 128) * 128
    assert np.array_equal(found[:last], cuda.numpy(whole)[:last])
    assert np.isnan(cuda.numpy(part, dtype)[last:]).all(), "rows behind the chunk were written"
    gemm.close()


@pytest.mark.gpu
def test_dependent_launches_keep_the_order(cuda: Any) -> None:
    tile, dtype = constant_sets("linear/gemm.cu")[0], DType.BFLOAT16
    gemm = cuda.kernel("gemm", dtype, **tile)
    shared = (128 + tile["TILE_N"]) * tile["TILE_K"] * 2 * tile["STAGES"]
    random = np.random.default_rng(3)
    w = cuda.array(random.standard_normal((512, 512), np.float32) / 22, dtype)
    results = []
    for pdl in (False, True):
        buffers = [
            cuda.array(np.random.default_rng(4).standard_normal((256, 512), np.float32), dtype) for _ in range(2)
        ]
        for step in range(12):
            source, target = buffers[step % 2], buffers[1 - step % 2]
            sizes = (*map(np.int32, (256, 512, 512, 512)), np.float32(1), np.float32(0))
            gemm(2 * 4, tile["TILE_N"], target, source, w, None, *sizes, smem=shared, pdl=pdl)
        results.append(cuda.numpy(buffers[0]))
    assert np.array_equal(*results)


@given(
    st.integers(1, 40_000), st.integers(1, 4000), st.integers(1, 1000), st.integers(4, 200),
    st.sampled_from([H200, ORIN, ADA]),
)  # fmt: skip
def test_a_chosen_tile_is_built_ahead_and_fits(m: int, n: int, k: int, num_sms: int, device: Device) -> None:
    tile = gemm_tile(m, 16 * n, 32 * k, replace(device, num_sms=num_sms))
    assert macros_of(tile) in constant_sets("linear/gemm.cu")
    assert tile.shared_bytes <= device.shared_bytes_per_block


def test_wide_products_take_wide_tiles_and_few_rows_narrow_ones() -> None:
    assert gemm_tile(8192, 32768, 4096, H200) == GemmConstants(tile_n=256, tile_k=64, stages=4)
    assert gemm_tile(8192, 32768, 4096, ORIN) == GemmConstants(tile_n=256, tile_k=64, stages=3)
    assert gemm_tile(8192, 32768, 4096, replace(ADA, num_sms=76)) == GemmConstants(tile_n=256, tile_k=32, stages=4)
    assert gemm_tile(100, 4096, 4096, H200).tile_n == 64


@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 32), (1, 24, 32), (1, 16, 48)])
def test_a_shape_that_the_kernel_does_not_take_is_refused(m: int, n: int, k: int) -> None:
    with pytest.raises(ValueError, match="multiples of 16 and K of 32"):
        gemm_tile(m, n, k, H200)
