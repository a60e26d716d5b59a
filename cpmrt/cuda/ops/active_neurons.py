"""The gated mlp of a step whose gates are mostly zero (FATReLU): rows of up and columns of down that no row needs stay
unread. The down matrix lies transposed in memory, so that what belongs to a neuron is one piece.

Its sums are other sums than those of `linear.cu`, so every step of 1 to 64 rows takes these kernels (row invariance).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.ops.linear import row_bucket

_FILE = "linear/active_neurons.cu"
_WARPS = 8
_THREADS = 32 * _WARPS
_TILE = 64
_DOWN_COLUMNS = 16
_ROW_BUCKETS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ActiveConstants:
    """Compile-time constants of active_neurons.cu, which explains them."""

    in_features: int
    rows: int
    fatrelu: int


ACTIVE_GATE_UP = KernelSpec("active_gate_up", _FILE, "gate_up", ActiveConstants, hot=True)
ACTIVE_DOWN = KernelSpec("active_down", _FILE, "project_residual", ActiveConstants, hot=True)
TRANSPOSE = KernelSpec("transpose", "linear/transpose.cu", "project_residual", hot=True)


@dataclass(frozen=True, eq=False, slots=True)
class TransposedWeight:
    """A matrix [N, K] in 16 bits whose transpose `data` [K, N] is on the device."""

    data: DeviceArray

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.data.shape[1], self.data.shape[0]


def active_gate_up(
    launch: Launcher, out: DeviceArray, x: DeviceArray, norm: DeviceArray, weight: DeviceArray, eps: float,
    threshold: int,
) -> None:  # fmt: skip
    """Launch the op `gate_up` with a FATReLU whose threshold has these bits, for 1 to 64 rows."""
    (num_rows, columns), width = x.shape, out.shape[1]
    rows = row_bucket(min(num_rows, _ROW_BUCKETS[-1]), _ROW_BUCKETS)
    launch(
        ACTIVE_GATE_UP, ActiveConstants(columns, rows, threshold), -(-width // _WARPS), _THREADS,
        out, x, norm, weight, np.int32(num_rows), np.int32(width), np.float32(eps), smem=(_WARPS + rows) * columns * 2,
    )  # fmt: skip


def active_down(launch: Launcher, x: DeviceArray, inner: DeviceArray, weight: TransposedWeight, scale: float) -> None:
    """Launch the op `project_residual` without a bias, for 1 to 64 rows of which most elements are zero."""
    columns, width = weight.shape[1], x.shape[1]
    launch(
        ACTIVE_DOWN, ActiveConstants(columns, 1, 0), (width // _DOWN_COLUMNS, len(x)), _THREADS,
        x, inner, weight.data, np.int32(width), np.float32(scale), smem=columns * 2,
    )  # fmt: skip


def transpose(launch: Launcher, out: DeviceArray, matrix: DeviceArray) -> None:
    """out [C, R] = the transpose of a matrix [R, C] of 16-bit elements; both counts are even."""
    num_rows, columns = matrix.shape
    grid = -(-columns // _TILE), -(-num_rows // _TILE)
    launch(TRANSPOSE, {}, grid, _THREADS, out, matrix, np.int32(num_rows), np.int32(columns))
