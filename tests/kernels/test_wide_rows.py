"""Products of a step that take the first columns of wider rows have the bits of products with these columns alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from linear_cases import EPS, layout_of, normals, relative_error
from packed_oracle import pack

from cpmrt.cuda.ops.linear_packed.layout import PackedWeight
from cpmrt.cuda.ops.products import Products
from cpmrt.dtypes import DType, from_float32, round_to
from cpmrt.ops import OPS
from cpmrt.reference.ops import NumpyOps
from cpmrt.tensor_spec import PLAIN_HEAD_DIM

OUT, COLUMNS, WIDTH, GROUP = 384, 768, 1056, 128


def weights_of(cuda: Any, rng: Any, dtype: DType, bits: int) -> tuple[Any, Any]:
    """Return a random weight [OUT, COLUMNS] as float32, and the same weight on the device in `bits` bits."""
    if bits == 16:
        weight = normals(rng, dtype)(OUT, COLUMNS, spread=COLUMNS**-0.5)
        return weight, cuda.array(weight, dtype)
    layout = layout_of("qkv", (OUT, COLUMNS), GROUP, cuda.device, zeros=0, head_dim=PLAIN_HEAD_DIM, bits=bits)
    codes = rng.integers(0, 2**bits, (OUT, COLUMNS)).astype(np.uint8)
    scales = round_to((0.5 + rng.random((OUT, COLUMNS // GROUP), np.float32)) * np.float32(0.2 * COLUMNS**-0.5), dtype)
    packed = pack(layout, codes, from_float32(scales, dtype), None)
    weight = (codes - np.float32(2 ** (bits - 1))) * np.repeat(scales, GROUP, axis=1)
    return weight, PackedWeight(cuda.array(packed), None, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16], ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("has_norm", [True, False])
def test_the_first_columns_of_wider_rows(cuda: Any, dtype: DType, bits: int, has_norm: bool) -> None:
    rng = np.random.default_rng(bits)
    weight, held = weights_of(cuda, rng, dtype, bits)
    rows, norm = normals(rng, dtype)(64, WIDTH), round_to(1 + 0.1 * rng.random(COLUMNS, np.float32), dtype)
    wanted = np.empty((64, OUT), np.float32)
    NumpyOps(dtype).project(wanted, rows, norm if has_norm else None, weight, EPS)
    scratch = {"packed_rows": (1 << 22, np.uint8), "packed_partials": (1 << 24, np.uint8),
               "packed_arrivals": (1 << 12, np.int32), "normed": (64 * COLUMNS, np.uint16)}  # fmt: skip
    arrays = {name: cuda.array(np.zeros(*size)) for name, size in scratch.items()}
    gemm: Any = None  # not used: no rows are of a chunk
    products = Products(cuda.device, cuda.launcher(dtype, pdl=True), gemm, arrays)
    on_device = cuda.array(norm, dtype) if has_norm else None

    def project(x: Any) -> Any:
        out = cuda.array(np.full((len(x), OUT), np.nan, np.float32), dtype)
        products.project(out, cuda.array(x, dtype), on_device, held, EPS)
        return cuda.numpy(out, dtype)

    everything = project(rows)
    for row in range(64):
        assert relative_error(everything[row], wanted[row]) < OPS["project"].tolerance[dtype], row
    rows[:, COLUMNS:] = np.nan
    for count in (1, 7, 8, 12, 16, 31, 32, 64):
        assert np.array_equal(project(rows[:count]), everything[:count]), count
        assert np.array_equal(project(rows[:count, :COLUMNS]), everything[:count]), count
