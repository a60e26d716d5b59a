"""Rounding to nearest, GPTQ and AWQ scales on single matrices, against formulas written out here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from cpmrt.dtypes import DType, round_to
from cpmrt.errors import CheckpointError
from cpmrt.quantization.awq import column_scales
from cpmrt.quantization.calibration import InputSums
from cpmrt.quantization.formats import packed, planned_tensors
from cpmrt.quantization.gptq import GptqSettings, gptq, inverse_factor
from cpmrt.quantization.grid import GridSettings, fit_grid, output_error, round_scales, round_to_nearest

PLAIN = GridSettings(32, search=False)


@pytest.fixture(scope="module", autouse=True)
def one_blas_thread():
    """Run BLAS on one thread: products this small take longer on several, and much longer on a busy machine."""
    with threadpool_limits(1):
        yield


def problem(seed: int, rows: int = 24, columns: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Return a weight and the sum of x x^T over inputs with correlated features of different sizes."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((rows, columns)).astype(np.float32) / 16
    mixing = random.standard_normal((columns, columns)) * np.exp(random.standard_normal(columns))
    inputs = (random.standard_normal((2 * columns, columns)) @ mixing).astype(np.float32)
    return weight, inputs.T @ inputs


def bits(words: np.ndarray, place: int) -> np.ndarray:
    """Return the 4 bits at `place` of every word."""
    return (words.astype(np.int64) >> (4 * place)) & 15


@given(st.lists(st.floats(2.0**-30, 2.0**15), min_size=1, max_size=20))
def test_scales_are_values_of_both_16_bit_types(values):
    scales = np.array(values, np.float32)
    rounded = round_scales(scales, DType.BFLOAT16)
    assert (rounded > 0).all()
    for dtype in (DType.BFLOAT16, DType.FLOAT16):
        np.testing.assert_array_equal(round_to(rounded, dtype), rounded)
    normal = scales > 2.0**-14
    assert (np.abs(rounded - scales)[normal] <= scales[normal] * (2.0**-8 + 2.0**-10)).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("min_zero", [0, 1])
def test_plain_grids_lose_at_most_half_a_step(symmetric, min_zero):
    random = np.random.default_rng(0)
    groups = random.standard_normal((40, 32)).astype(np.float32) + np.linspace(-5, 5, 40, dtype=np.float32)[:, None]
    grid = fit_grid(groups, GridSettings(32, symmetric, False, min_zero))
    codes = grid.codes(groups)
    assert grid.zeros.min() >= min_zero and grid.zeros.max() <= 15 and codes.min() >= 0 and codes.max() <= 15
    # Scales are rounded to 8 bits, and the largest of a symmetric group is half a step beyond the last code.
    assert (np.abs(grid.values(codes) - groups) <= 0.56 * grid.scales).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_of_zeros_stays_zero(symmetric):
    quantised = round_to_nearest(np.zeros((8, 64), np.float32), GridSettings(32, symmetric))
    assert not quantised.values().any() and np.isfinite(quantised.scales).all()


def test_a_searched_grid_is_never_worse():
    random = np.random.default_rng(1)
    groups = random.standard_t(3, (50, 128)).astype(np.float32)
    importance = random.random(128).astype(np.float32)

    def error(search):
        grid = fit_grid(groups, GridSettings(128, search=search), importance)
        return (np.square(grid.values(grid.codes(groups)) - groups) * importance).sum(axis=1)

    plain, searched = error(False), error(True)
    assert (searched <= plain).all() and searched.sum() < 0.8 * plain.sum()


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("order", [{}, {"act_order": True}, {"act_order": True, "static_groups": True}])
def test_gptq_beats_rounding_to_nearest(group_size, symmetric, order):
    for seed in range(3):
        weight, hessian = problem(seed)
        grid = GridSettings(group_size, symmetric)
        nearest = round_to_nearest(weight, grid).values()
        ours = gptq(weight, hessian, grid, GptqSettings(**order))
        assert output_error(weight, ours.values(), hessian) < 0.5 * output_error(weight, nearest, hessian)
        sizes = np.bincount(ours.group)
        assert (sizes == grid.group_of(256)).all() and ours.scales.shape == ours.zeros.shape == (24, len(sizes))


def test_gptq_with_unrelated_inputs_is_rounding_to_nearest():
    weight, _ = problem(5)
    ours, nearest = gptq(weight, np.eye(256, dtype=np.float32), PLAIN, GptqSettings()), round_to_nearest(weight, PLAIN)
    np.testing.assert_array_equal(ours.codes, nearest.codes)
    np.testing.assert_array_equal(ours.values(), nearest.values())


def test_gptq_is_optimal_brain_quantisation_in_order():
    """GPTQ gives the codes of equations 2 and 3 of its paper, computed by Gaussian elimination without Cholesky or
    blocks."""
    weight, hessian = problem(7, rows=6, columns=160)
    grid = fit_grid(weight.reshape(6, -1, 32), PLAIN)
    scales, zeros = (np.repeat(part[..., 0], 32, axis=1).astype(np.float64) for part in (grid.scales, grid.zeros))
    damped = hessian + 0.01 * hessian.diagonal().mean() * np.eye(160)
    inverse, remaining = np.linalg.inv(damped.astype(np.float64)), weight.astype(np.float64)
    expected = np.empty((6, 160), np.uint8)
    for column in range(160):
        code = np.clip(np.rint(remaining[:, column] / scales[:, column]) + zeros[:, column], 0, 15)
        error = remaining[:, column] - scales[:, column] * (code - zeros[:, column])
        remaining -= np.outer(error, inverse[column] / inverse[column, column])
        inverse = inverse - np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
        inverse[column, column] = 1.0
        expected[:, column] = code
    ours = gptq(weight, hessian, PLAIN, GptqSettings(static_groups=True))
    assert (ours.codes != expected).mean() < 0.005


def test_the_factor_is_that_of_the_inverse():
    _, hessian = problem(2)
    factor = inverse_factor(hessian, 0.01).astype(np.float64)
    damped = hessian + 0.01 * hessian.diagonal().mean() * np.eye(256)
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(256), atol=1e-3)
    assert not np.tril(factor, -1).any()


def test_act_order_groups_columns_by_the_size_of_their_inputs():
    weight, hessian = problem(3)
    ours = gptq(weight, hessian, PLAIN, GptqSettings(act_order=True))
    largest = np.argsort(-hessian.diagonal())
    np.testing.assert_array_equal(ours.group[largest], np.arange(256) // 32)
    static = gptq(weight, hessian, PLAIN, GptqSettings(act_order=True, static_groups=True))
    np.testing.assert_array_equal(static.group, np.arange(256) // 32)


def test_an_input_that_is_always_zero_is_rounded_to_nearest():
    weight, hessian = problem(4)
    hessian[10] = hessian[:, 10] = 0
    ours, nearest = gptq(weight, hessian, PLAIN, GptqSettings(static_groups=True)), round_to_nearest(weight, PLAIN)
    np.testing.assert_array_equal(ours.values()[:, 10], nearest.values()[:, 10])


@pytest.mark.parametrize("broken", [np.nan, -1e6])
def test_a_broken_hessian_is_refused(broken):
    weight, hessian = problem(4)
    hessian[3, 3] = broken
    with pytest.raises(CheckpointError, match="not positive definite"):
        gptq(weight, hessian, PLAIN, GptqSettings())


def test_awq_scales_help_where_a_few_inputs_are_large():
    random = np.random.default_rng(6)
    weight = random.standard_normal((32, 128)).astype(np.float32)
    inputs = random.standard_normal((512, 128)).astype(np.float32)
    inputs[:, ::16] *= 50
    sums, grid = InputSums.over(iter([inputs]), 0), GridSettings(64, False, False)
    scales = column_scales([weight], sums, grid)
    assert scales.shape == (128,) and scales[::16].min() > scales[1:16].max()

    def error(scales):
        return output_error(weight, round_to_nearest(weight * scales, grid).values() / scales, sums.hessian)

    assert error(scales) < 0.5 * error(np.ones(128, np.float32))


def test_input_sums_skip_the_first_positions():
    inputs = np.random.default_rng(0).standard_normal((2, 10, 8)).astype(np.float32)
    sums, kept = InputSums.over(iter(inputs), 3), inputs[:, 3:].reshape(-1, 8)
    np.testing.assert_allclose(sums.hessian, kept.T @ kept, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums.magnitude, np.abs(kept).sum(0), rtol=1e-5)
    assert sums.num_rows == 14


@pytest.mark.parametrize("name", ["gptq", "gptq_v2"])
def test_gptq_files_unpacked_bit_by_bit(name):
    weight, hessian = problem(8)
    ours = gptq(weight, hessian, GridSettings(64, False, min_zero=1), GptqSettings(act_order=True))
    tensors = packed(name, ours)
    assert {key: (value.dtype, value.shape) for key, value in tensors.items()} == {
        "qweight": (np.int32, (32, 24)), "qzeros": (np.int32, (4, 3)), "scales": (np.float16, (4, 24)),
        "g_idx": (np.int32, (256,)),
    }  # fmt: skip
    read = np.empty((256, 24), np.float32)
    for column in range(256):
        group = tensors["g_idx"][column]
        zeros = np.stack([bits(tensors["qzeros"][group], place) for place in range(8)], axis=1).reshape(24)
        codes = bits(tensors["qweight"][column // 8], column % 8)
        read[column] = (codes - zeros - (name == "gptq")) * tensors["scales"][group].astype(np.float32)
    np.testing.assert_array_equal(read.T, ours.values())


def test_awq_files_unpacked_bit_by_bit():
    weight, _ = problem(9)
    ours = round_to_nearest(weight, GridSettings(128, False))
    tensors = packed("awq", ours)
    assert tensors["qweight"].shape == (256, 3) and tensors["qzeros"].shape == (2, 3)
    read = np.empty((256, 24), np.float32)
    for row in range(24):
        place = (0, 4, 1, 5, 2, 6, 3, 7)[row % 8]
        zeros = np.repeat(bits(tensors["qzeros"][:, row // 8], place), 128)
        scales = np.repeat(tensors["scales"][:, row].astype(np.float32), 128)
        read[:, row] = (bits(tensors["qweight"][:, row // 8], place) - zeros) * scales
    np.testing.assert_array_equal(read.T, ours.values())


@pytest.mark.parametrize("name", ["gptq", "gptq_v2", "awq"])
def test_what_is_planned_is_what_is_packed(name):
    weight, _ = problem(9)
    ours = round_to_nearest(weight, GridSettings(-1, False, min_zero=1))
    plans, tensors = planned_tensors(name, 24, 256, 1), packed(name, ours)
    assert {key: plan.shape for key, plan in plans.items()} == {key: array.shape for key, array in tensors.items()}
    assert all(plans[key].nbytes == array.nbytes for key, array in tensors.items())


@pytest.mark.gpu
@pytest.mark.parametrize("order", [{}, {"act_order": True}])
def test_a_gpu_gives_the_same_codes(order):
    cupy = pytest.importorskip("cupy")
    weight, hessian = problem(0)
    grid, settings = GridSettings(64, False), GptqSettings(**order)
    ours = gptq(cupy.asarray(weight), cupy.asarray(hessian), grid, settings)
    exact = gptq(weight, hessian, grid, settings)
    assert (ours.codes.get() != exact.codes).mean() < 0.02
    error = output_error(weight, ours.values().get(), hessian)
    assert error < 1.02 * output_error(weight, exact.values(), hessian)
    nearest = round_to_nearest(cupy.asarray(weight), grid)
    np.testing.assert_array_equal(nearest.codes.get(), round_to_nearest(weight, grid).codes)
