"""group_pairs.cu against a stable sort: every length of a warp's stretch of pairs, all pairs of one expert, and pairs
without an expert."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.dtypes import DType

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_pairs", [1, 2, 31, 32, 33, 1000, 1024, 1025, 8192, 10007])
@pytest.mark.parametrize("experts", [1, 5, 8, 32])
def test_pairs_are_sorted_by_expert(cuda: Any, num_pairs: int, experts: int) -> None:
    random = np.random.default_rng(num_pairs + experts)
    for chosen in (random.integers(-1, experts, num_pairs), np.full(num_pairs, experts - 1), np.full(num_pairs, -1)):
        chosen = chosen.astype(np.int32)
        starts, order = cuda.array(np.full(experts + 1, -7, np.int32)), cuda.array(np.full(num_pairs, -7, np.int32))
        kernel = cuda.kernel("group_pairs", DType.BFLOAT16, EXPERTS=experts)
        kernel(1, 1024, starts, order, cuda.array(chosen), np.int32(num_pairs))
        counts = np.bincount(chosen[chosen >= 0], minlength=experts)
        np.testing.assert_array_equal(cuda.numpy(starts), [0, *np.cumsum(counts)])
        wanted = np.argsort(chosen, kind="stable")[np.count_nonzero(chosen < 0) :]
        found = cuda.numpy(order)
        np.testing.assert_array_equal(found[: len(wanted)], wanted)
        assert (found[len(wanted) :] == -7).all()
