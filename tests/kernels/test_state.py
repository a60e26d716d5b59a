"""copy_state: copies a slot's states to a snapshot or from one, or clears them, in every layer and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpmrt.cuda.ops.slot_states import SlotStates
from cpmrt.dtypes import DType

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 64, 64), (5, 17, 4)])
def test_states_of_slots_and_snapshots(cuda: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    states, snapshots = rng.standard_normal((4, 3, *shape), np.float32), np.full((4, 7, *shape), np.nan, np.float32)
    on_device = cuda.array(states), cuda.array(snapshots)
    copies = SlotStates(cuda.launcher(DType.BFLOAT16), [on_device])
    copies.keep(2, 5)
    copies.begin(0, 5)
    copies.begin(1, None)
    snapshots[:, 5] = states[:, 2]
    states[:, 0], states[:, 1] = states[:, 2], 0
    np.testing.assert_array_equal(cuda.numpy(on_device[0]), states)
    np.testing.assert_array_equal(cuda.numpy(on_device[1]), snapshots)
