"""Products of a prefill chunk: by cuBLASLt where it gives the bits of the kernel gemm.cu, else by that kernel.

A row's bits depend on the row, the weight and the factors alone: gemm.cu sums along K in ascending order whatever its
tile, and only those algorithms of the library are used that agree with it (`gemm_trial`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from cpmrt.cuda.build.launcher import Launcher
from cpmrt.cuda.build.spec import KernelSpec
from cpmrt.cuda.driver.array import DeviceArray
from cpmrt.cuda.driver.blaslt import CublasLt, CublasLtError, MatmulPlan
from cpmrt.cuda.driver.device import Device
from cpmrt.cuda.ops import gemm_trial
from cpmrt.cuda.ops.gemm_trial import GemmTrial
from cpmrt.models.layers import EMBED, HEAD
from cpmrt.tensor_spec import BufferSpec

TILE_ROWS = 128
# (tile_k, stages) by tile_n, the deepest pipeline first.
_PIPELINES = {256: ((64, 4), (64, 3), (32, 4)), 128: ((64, 3), (32, 3)), 64: ((32, 3),)}
# The time of a column of y relative to the widest tile (estimated): narrow tiles read x more often.
_COLUMN_COST = {256: 1.0, 128: 1.1, 64: 1.3}
_RESERVED_BYTES = 1024
"""Bytes of shared memory that the driver reserves for each block."""


@dataclass(frozen=True, slots=True)
class GemmConstants:
    """Compile-time constants of gemm.cu: columns of a tile, columns of K that a stage holds, stages in flight."""

    tile_n: int
    tile_k: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory of a block."""
        return (TILE_ROWS + self.tile_n) * self.tile_k * 2 * self.stages


GEMM_WORKSPACE = BufferSpec("gemm_workspace", (32 << 20,), EMBED, HEAD, np.uint8)
GEMM = KernelSpec("gemm", "linear/gemm.cu", "project_residual", GemmConstants, hot=True)


class Gemm:
    """Computes y = alpha x w^T + beta y, the product rounded before y is added.

    `reason` says why cuBLASLt is not used, or not for every shape; None if it is.
    """

    def __init__(self, device: Device, launcher: Launcher, workspace: DeviceArray, *, use_library: bool = True):
        self._device, self._launch, self._stream = device, launcher, launcher.stream
        self._dtype = launcher.modules.dtype
        self._library: CublasLt | None = None
        self._trial: GemmTrial | None = None
        self._plans: dict[tuple[int, int, int, int], MatmulPlan | None] = {}
        self.reason: str | None = None if use_library else "switched off"
        if use_library:
            self._trial = GemmTrial(workspace, self._dtype, launcher.stream, self._launch_own, self._trial_basis)
            try:
                self._library = CublasLt(workspace.data.ptr, self._trial.free_bytes)
            except CublasLtError as error:
                self.reason = str(error)

    def __call__(
        self, y: DeviceArray, x: DeviceArray, w: DeviceArray,
        *, alpha: float = 1.0, beta: float = 0.0, chunk: DeviceArray | None = None,
    ) -> None:  # fmt: skip
        """Launch the product of contiguous x [M, K] and w [N, K] into y [M, N], perhaps columns of a wider matrix.

        `chunk` (slot, start, count): whole groups of rows behind the first `count` may be left out.
        """
        # Which shapes the library takes turns out when they run; the trials by which it does need one kernel.
        if self._library is not None and self._launch.is_recording:
            self._launch(GEMM, trial_tile(self._device), 1, 1)
            return
        (num_rows, inner), columns, stride = x.shape, w.shape[0], y.strides[0] // y.itemsize
        plan = self._plan((num_rows, columns, inner, stride))
        if self._library is None or plan is None:
            self._launch_own(y, x, w, alpha, beta, chunk)
            return
        self._launch.release()  # the library's kernels do not come by way of the launcher
        addresses = (y.data.ptr, x.data.ptr, w.data.ptr)
        self._library.matmul(plan, *addresses, self._stream.ptr, alpha=alpha, beta=beta)

    def _plan(self, shape: tuple[int, int, int, int]) -> MatmulPlan | None:
        """Return the library's plan for M, N, K and the stride of y; None if no suggested algorithm agrees."""
        if self._library is None or self._trial is None:
            return None
        if shape not in self._plans:
            library, (num_rows, columns, inner, stride) = self._library, shape
            agrees = partial(self._trial.agrees, library)
            try:
                self._plans[shape] = library.plan(num_rows, columns, inner, self._dtype, stride, agrees)
            except CublasLtError as error:
                self._plans[shape], self.reason = None, str(error)
        return self._plans[shape]

    def _trial_basis(self) -> tuple[object, ...]:
        """Return the values that a verdict depends on: a verdict of another start counts if they are equal."""
        device = self._device
        cubin = self._launch.modules.cubin(GEMM, trial_tile(device))
        return cubin.name, device.name, device.arch, device.num_sms, device.driver_version

    def _launch_own(
        self, y: DeviceArray, x: DeviceArray, w: DeviceArray, alpha: float, beta: float,
        chunk: DeviceArray | None = None,
    ) -> None:  # fmt: skip
        (num_rows, inner), columns, stride = x.shape, w.shape[0], y.strides[0] // y.itemsize
        tile = gemm_tile(num_rows, columns, inner, self._device)
        grid = -(-num_rows // TILE_ROWS) * -(-columns // tile.tile_n)
        sizes = tuple(map(np.int32, (num_rows, columns, inner, stride)))
        factors = np.float32(alpha), np.float32(beta)
        self._launch(GEMM, tile, grid, tile.tile_n, y, x, w, chunk, *sizes, *factors, smem=tile.shared_bytes)

    def close(self) -> None:
        """Free the library's handles, and let go of the workspace."""
        if self._library is not None:
            self._library.close()
        self._trial = None


def trial_tile(device: Device) -> GemmConstants:
    """Return the tile of gemm.cu in the trials of the library's algorithms."""
    return gemm_tile(gemm_trial.ROWS, gemm_trial.COLUMNS, gemm_trial.INNER, device)


def gemm_tile(num_rows: int, columns: int, inner: int, device: Device) -> GemmConstants:
    """Choose the tile for Y [num_rows, columns] = X [num_rows, inner] W^T on a device.

    A block of `tile_n` threads computes `TILE_ROWS` rows. No choice changes a bit of the result. Raises ValueError for
    a shape that the kernel does not take.
    """
    if num_rows < 1 or columns < 1 or inner < 1 or columns % 16 or inner % 32:
        raise ValueError(f"gemm takes N in multiples of 16 and K of 32, got M={num_rows} N={columns} K={inner}")
    row_tiles = -(-num_rows // TILE_ROWS)

    def cost(tile_n: int) -> float:
        # The multiprocessor with the most blocks ends last; its blocks share its tensor cores.
        return -(-row_tiles * -(-columns // tile_n) // device.num_sms) * tile_n * _COLUMN_COST[tile_n]

    tile_n = min(_PIPELINES, key=cost)
    # The deepest pipeline that leaves room for 256 / tile_n blocks on a multiprocessor, else the smallest.
    budget = (device.shared_bytes_per_block + _RESERVED_BYTES) * tile_n // 256 - _RESERVED_BYTES
    choices = [GemmConstants(tile_n, *pipeline) for pipeline in _PIPELINES[tile_n]]
    return next((choice for choice in choices if choice.shared_bytes <= budget), choices[-1])
