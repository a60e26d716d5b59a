"""round_weights against the rounding of the host, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType, from_float32, round_to
from cpmrt.tensor_spec import Quantization
from cpmrt.weights.formats import GPTQ
from cpmrt.weights.quantised import round_to_nearest

DTYPES = [DType.BFLOAT16, DType.FLOAT16]


def rounded(cuda: Any, values: Any, group_size: int, dtype: DType, bits: int = 4) -> tuple[Any, Any, int]:
    """Return codes [N, K] in the form of `round_to_nearest`, storage words of the scales [N, groups], and the fault
    word."""
    rows, columns = values.shape
    codes = cuda.array(np.zeros((columns * bits // 32, rows), np.int32))
    scales = cuda.array(np.full((columns // group_size, rows), np.nan, np.float32), dtype)
    fault, sizes = cuda.array(np.zeros(1, np.uint32)), (np.int32(rows), np.int32(columns), np.int32(group_size))
    kernel = cuda.kernel("round_weights", dtype, WEIGHT_BITS=bits)
    kernel(-(-rows * columns // 2048), 256, codes, scales, fault, cuda.array(values, dtype), *sizes)
    words = cuda.numpy(codes)
    if bits == 8:
        around_zero = np.ascontiguousarray(words.T).view(np.uint8).astype(np.int16) - 128
        return around_zero.astype(np.int8), cuda.numpy(scales).T, int(cuda.numpy(fault)[0])
    if bits == 2:
        found = np.ascontiguousarray(words.T).view(np.uint8)
        return found, cuda.numpy(scales).T, int(cuda.numpy(fault)[0])
    found = GPTQ.codes.unpack(words)
    return found[:, 0::2] | found[:, 1::2] << 4, cuda.numpy(scales).T, int(cuda.numpy(fault)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize(
    ("shape", "group_size"), [((1, 128), 128), ((99, 256), 32), ((264, 4096), 128), ((16, 192), 64)]
)
def test_codes_and_scales_are_those_of_the_host(
    cuda: Any, shape: tuple[int, int], group_size: int, dtype: DType, bits: int
) -> None:
    random = np.random.default_rng(shape[0])
    spread = np.exp2(random.integers(-20, 6, (shape[0], 1))).astype(np.float32)
    values = round_to(random.standard_normal(shape, np.float32) * spread, dtype)
    values[-1, :group_size] = 0
    values[0, 0] = 1e-7
    values = round_to(values, dtype)
    codes, scales = round_to_nearest(values, Quantization(bits, group_size), dtype)
    found, words, fault = rounded(cuda, values, group_size, dtype, bits)
    assert np.array_equal(found, codes)
    assert np.array_equal(words.view(np.uint16), from_float32(scales, dtype).view(np.uint16)) and fault == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize(
    ("shape", "group_size"), [((1, 128), 128), ((99, 256), 32), ((264, 4096), 128), ((16, 192), 64)]
)
def test_ternary_values_get_codes_without_loss(
    cuda: Any, shape: tuple[int, int], group_size: int, dtype: DType
) -> None:
    random = np.random.default_rng(shape[0])
    scales = np.exp2(random.uniform(-10, 4, (shape[0], shape[1] // group_size)))
    factors = round_to(np.repeat(scales, group_size, axis=1).astype(np.float32), dtype)
    values = (random.integers(-1, 2, shape) * factors).astype(np.float32)
    values[-1, :group_size] = 0
    codes, scales = round_to_nearest(values, Quantization(2, group_size), dtype)
    found, words, fault = rounded(cuda, values, group_size, dtype, bits=2)
    assert np.array_equal(found, codes)
    assert np.array_equal(words.view(np.uint16), from_float32(scales, dtype).view(np.uint16)) and fault == 0
    for value in (np.nan, np.inf, 1.5 * float(factors.max()), 0.5 * float(factors[-1, -1])):
        values[-1, -2:] = factors[-1, -1], value
        assert rounded(cuda, values, group_size, dtype, bits=2)[2] == 1, value


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_is_flagged(cuda: Any, value: float) -> None:
    values = np.ones((3, 64), np.float32)
    values[2, 63] = value
    assert rounded(cuda, values, 32, DType.BFLOAT16, bits=8)[2] == rounded(cuda, values, 32, DType.BFLOAT16)[2] == 1
