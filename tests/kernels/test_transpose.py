"""transpose against NumPy, bit for bit, with sizes that fill no tile and guards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.cuda.ops.active_neurons import transpose
from cpmrt.dtypes import DType

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (64, 64), (66, 130), (1536, 3840), (16, 1000), (1000, 16)])
def test_every_element_goes_to_its_place(cuda: Any, rows: int, columns: int) -> None:
    words = np.random.default_rng(rows).integers(0, 1 << 16, (rows, columns), dtype=np.uint16)
    whole = cuda.array(np.full(rows * columns + 512, 0x7FC1, np.uint16))
    launch = cuda.launcher(DType.BFLOAT16, pdl=True)
    transpose(launch, whole[256:-256].reshape(columns, rows), cuda.array(words))
    found = cuda.numpy(whole)
    np.testing.assert_array_equal(found[256:-256].reshape(columns, rows), words.T)
    assert (found[:256] == 0x7FC1).all() and (found[-256:] == 0x7FC1).all()
