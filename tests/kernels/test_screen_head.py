"""screen_head: the 8-bit copy of a head against the rounding of the host, and its bounds against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from packed_oracle import pack, unpack_codes
from screened_head_cases import random_head

from cpmrt.cuda.ops.screened_head import COPY
from cpmrt.dtypes import DType, from_float32
from cpmrt.tensor_spec import Quantization
from cpmrt.weights.quantised import round_to_nearest

pytestmark = pytest.mark.gpu
DTYPES = [DType.BFLOAT16, DType.FLOAT16]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ["small", "demo", "odd"])
def test_the_copy_and_its_bounds(cuda: Any, name: str, dtype: DType) -> None:
    head = random_head(cuda, name, dtype)
    head.screen.fill()
    codes, scales = round_to_nearest(head.weight, Quantization(8, 128), dtype)
    unsigned = (codes.view(np.int8).astype(np.int16) + 128).astype(np.uint8)
    packed, layout = cuda.numpy(head.arrays[f"{COPY}.codes"]), head.plan.layout
    assert np.array_equal(unpack_codes(layout, packed), unsigned)
    expected = pack(layout, unsigned, from_float32(scales, dtype), None)
    rows = head.vocab // 16 * 16  # whole tiles: the last one may have padding rows
    assert np.array_equal(packed[: rows // 16 * layout.tile_bytes], expected[: rows // 16 * layout.tile_bytes])
    wide = head.weight.astype(np.float64)
    held = (unsigned.astype(np.float64) - 128) * np.repeat(scales.astype(np.float64), 128, axis=1)
    apart, bounds = np.linalg.norm(wide - held, axis=1), cuda.numpy(head.arrays["head_bounds"])
    assert (bounds > apart).all() and (bounds < 1.3 * apart + 1e-9).all()
